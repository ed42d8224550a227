"""The chat on the whole screen. It shows what the engine says and holds no engine logic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, ClassVar

from textual import on, work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer

from edgespec.chat import Chat
from edgespec.conversations import Store
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine import Finished
from edgespec.engine import Notice as EngineNotice
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest
from edgespec.planning import OpenRequest
from edgespec.registry.schema import SamplingDefaults
from edgespec.text.stream import Piece
from edgespec.tui import commands
from edgespec.tui.backstage import Backstage
from edgespec.tui.colours import HIGH_CONTRAST
from edgespec.tui.details import Details
from edgespec.tui.foot import foot, measured
from edgespec.tui.gauges import Gauges
from edgespec.tui.help import Help
from edgespec.tui.keeping import Keeper
from edgespec.tui.keys import BINDINGS
from edgespec.tui.log import Log
from edgespec.tui.messages import Batch, Ended, Progressed, Ready, Told, bug
from edgespec.tui.panel import Panel, Strip, readings
from edgespec.tui.progress import Progress
from edgespec.tui.prompt import Prompt
from edgespec.tui.race import FRAME_S
from edgespec.tui.screenside import Screenside
from edgespec.tui.turns import Answer, Notice, Said
from edgespec.worker import Job

_NARROW = 100  # columns below which the instruments are one line


class ChatApp(App[None]):
    """One conversation with one model, on one worker thread."""

    CSS_PATH = "style.tcss"
    TITLE = "edgespec"
    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    def __init__(
        self,
        request: OpenRequest,
        chat: Chat,
        store: Store,
        *,
        sampling: Callable[[SamplingDefaults], SamplingParams] = lambda _: SamplingParams(),
        resume: int | None = None,
        then: str = "",
    ) -> None:
        """`sampling`, given the model's recommended defaults, says how to sample; `resume` is a stored conversation;
        `then` is a command to run once the model is open.
        """
        super().__init__()
        self.request = request
        self.chat = chat
        self.keeper = Keeper(chat, store, lambda text: self.post_message(Told(text, kind="error")))
        self.backstage = Backstage()
        self.reporter = Screenside(self)
        self.gauges = Gauges()
        self.job: Job[Any] | None = None
        self.answer: Answer | None = None
        self.finished: Finished | None = None
        self._sampling = sampling
        self._resume = resume
        self._then = then
        self._folded = True
        self._origins = False

    def compose(self) -> ComposeResult:
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield Log()
                yield Progress()
                yield Prompt()
            yield Panel()
        yield Strip()
        yield Footer()

    async def on_mount(self) -> None:
        self.register_theme(HIGH_CONTRAST)
        self.query_one(Prompt).focus()
        if self.keeper.store.notice is not None:
            await self.say(self.keeper.store.notice, "error")
        if self._resume is not None:
            await self.resume(self._resume)
        self.open(self.request)

    # What workers do: they only post messages.

    def open(self, request: OpenRequest) -> None:
        """Open a model; the conversation stays."""
        self.job = self.backstage.open(request, self.reporter)
        self._follow(self.job, self.job, lambda opened: Ready(opened, request, is_new=True))

    def change_draft(self, request: OpenRequest) -> None:
        self.job = self.backstage.change_draft(request, self.reporter)
        self._follow(self.job, self.job, lambda opened: Ready(opened, request, is_new=False))

    @work(thread=True)
    def _follow(self, job: Job[Any], events: Iterable[Any], message: Callable[[Any], Message]) -> None:
        """Post what a job yields until it ends, however it does."""
        try:
            for event in events:
                self.post_message(message(event))
        except Cancelled:
            self.post_message(Told("stopped."))
        except EdgespecError as error:
            self.post_message(Told(error.message, error.hint, "error"))
        except Exception as error:  # noqa: BLE001 - a bug of ours must not take the conversation with it
            self.post_message(bug(error))
        self.post_message(Ended(job))

    # What the user does.

    @on(Prompt.Sent)
    async def _sent(self, message: Prompt.Sent) -> None:
        if message.text.startswith("/"):
            await self.run_command(message.text[1:])
        else:
            await self.ask(message.text)

    async def run_command(self, line: str) -> None:
        await commands.run(self, line)

    async def action_command(self, line: str) -> None:
        await self.run_command(line)

    async def ask(self, text: str) -> None:
        """Send `text` and have it answered."""
        if self.job is not None or self.backstage.opened is None:
            self.query_one(Prompt).put(text)
            why = "wait for what is under way; Esc stops it." if self.job else "no model is open; /model chooses one."
            await self.say(why, "error")
            return
        self.keeper.ask(text)
        log = self.query_one(Log)
        await log.add(Said(text, len(self.keeper.questions)))
        log.anchor()
        await self.generate()

    async def generate(self) -> None:
        """Answer the conversation as it stands."""
        opened = self.backstage.opened
        if opened is None:
            raise InvalidRequest("no model is open.", hint="/model chooses one.")
        self.gauges = Gauges(plain=opened.plain_speed, asked_s=perf_counter())
        self.finished = None
        request = self.chat.request()
        self.keeper.begin_answer({"model": opened.name, "draft": opened.draft})
        self.answer = Answer(opened.draft)
        await self.query_one(Log).add(self.answer)
        self._dress()
        self.job = self.backstage.stream(request)
        self._follow(self.job, self.job.batches(FRAME_S), Batch)

    async def resume(self, id: int) -> None:
        """Show a stored conversation and go on with it."""
        try:
            self.keeper.resume(id)
        except EdgespecError as error:
            await self.say(f"{error.message} {error.hint}", "error")
            return
        await self.show_turns()

    def require_idle(self) -> None:
        """Raises InvalidRequest while something is under way."""
        if self.job is not None:
            raise InvalidRequest("that has to wait for what is under way.", hint="Esc stops it.")

    def action_stop(self) -> None:
        """Stop what is under way; else copy what is selected."""
        if self.job is not None:
            self.job.cancel()
        elif selected := self.screen.get_selected_text():
            self.copy_to_clipboard(selected)

    @on(Prompt.Left)
    def action_leave(self) -> None:
        if self.job is not None:
            self.job.cancel()
        self.exit()

    def action_help(self) -> None:
        self.push_screen(Help(commands.HELP))

    def action_details(self) -> None:
        engine = self.backstage.opened.engine if self.backstage.opened else None
        self.push_screen(Details(self.gauges, engine.experience if engine and engine.has_experience else None))

    def action_fold(self) -> None:
        self._folded = not self._folded
        self._dress()

    def action_origins(self) -> None:
        self._origins = not self._origins
        self._dress()

    async def action_clear_screen(self) -> None:
        """The conversation stays; an answer under way stays on the screen too."""
        await self.query_one(Log).clear(besides=self.answer)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for name, told, run in commands.palette(self):
            yield SystemCommand(name, told, run)

    # What workers said.

    @on(Batch)
    async def _batch(self, message: Batch) -> None:
        pieces: list[Piece] = []
        for event in message.events:
            if isinstance(event, Step):
                self.gauges.add(event)
            elif isinstance(event, Piece):
                pieces.append(event)
            elif isinstance(event, PrefillProgress):
                self.gauges.read(event)
            elif isinstance(event, EngineNotice):
                await self.say(event.text)
            elif isinstance(event, Finished):
                self.finished = event
        self.query_one(Progress).show(*self.gauges.reading)
        if (answer := self.answer) is not None and pieces:
            await answer.grow(pieces)
            self.keeper.grow(answer.text, answer.reasoning, lambda: answer.spans)
        self.show_instruments()

    @on(Ready)
    async def _is_open(self, message: Ready) -> None:
        opened = message.opened
        self.request = message.request
        if message.is_new:
            self.chat.sampling = self._sampling(opened.sampling)
        self.keeper.use_model(opened.name)
        await self.say(f"{opened.name} on {opened.backend}, draft {opened.draft}.")
        self.show_instruments()

    @on(Told)
    async def _told(self, message: Told) -> None:
        await self.say(f"{message.text} {message.hint}".strip(), message.kind)

    @on(Progressed)
    def _progressed(self, message: Progressed) -> None:
        if self.job is not None:
            self.query_one(Progress).show(message.text, message.fraction)

    @on(Ended)
    async def _ended(self, message: Ended) -> None:
        if message.job is not self.job:
            return
        self.job = None
        self.query_one(Progress).show(None)
        answer, self.answer = self.answer, None
        if answer is not None:
            metrics = measured(self.finished, self.gauges.plain)
            await answer.finish(foot(metrics))
            self.keeper.finish(answer.text, answer.reasoning, answer.spans, metrics)
            if not answer.text and not answer.reasoning:
                await answer.remove()
        self.show_instruments()
        then, self._then = self._then, ""
        if then and self.backstage.opened is not None:
            await self.run_command(then)

    # What is shown.

    async def say(self, text: str, kind: str = "note") -> None:
        """A sentence in the conversation."""
        await self.query_one(Log).add(Notice(text[:1].upper() + text[1:], kind))

    async def show_turns(self) -> None:
        """Draw the conversation anew."""
        await self.query_one(Log).show(self.keeper.turns)
        self._dress()

    def show_instruments(self) -> None:
        if (opened := self.backstage.opened) is not None:
            now = readings(opened, self.backstage.devices)
            self.query_one(Panel).show(self.gauges, now)
            self.query_one(Strip).show(self.gauges, now)

    def _dress(self) -> None:
        """Reasoning folded or not, and origins shown or not, as the user last wished."""
        for answer in self.query(Answer):
            answer.fold(self._folded)
            answer.show_origins(self._origins)

    def on_resize(self, event: Resize) -> None:
        self.screen_stack[0].set_class(event.size.width < _NARROW, "narrow")

    async def on_unmount(self) -> None:
        self.backstage.close()
        self.keeper.close()
