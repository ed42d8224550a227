"""The chat on the whole screen. It shows what the engine says and holds no engine logic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import perf_counter, thread_time
from typing import Any, ClassVar

from textual import on, work
from textual.app import SystemCommand
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen

from edgespec.conversations import Store
from edgespec.conversations.chat import Chat
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Finished
from edgespec.engine.events import Notice as EngineNotice
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest
from edgespec.planner.plan import OpenRequest
from edgespec.registry.schema import SamplingDefaults
from edgespec.service.client import Stage, standing_of
from edgespec.service.worker import Job
from edgespec.text.stream import Piece
from edgespec.tui import commands
from edgespec.tui.colours import HIGH_CONTRAST
from edgespec.tui.details import Details
from edgespec.tui.foot import foot, measured
from edgespec.tui.gauges import Gauges
from edgespec.tui.help import Help
from edgespec.tui.keeping import Keeper
from edgespec.tui.keys import BINDINGS
from edgespec.tui.log import Log
from edgespec.tui.messages import Batch, Ended, Progressed, Ready, Told, told_of
from edgespec.tui.panel import Panel, Strip, readings
from edgespec.tui.progress import Progress
from edgespec.tui.prompt import Prompt
from edgespec.tui.race import FRAME_S
from edgespec.tui.screenside import Screenside
from edgespec.tui.turns import Answer, Said
from edgespec.tui.window import Window

_READ_EVERY_S = 0.1
# What the engine decodes on may be all that this machine has, so the screen takes an eighth of a processor at most.
_REST = 7  # times what a frame took
_LONGEST_REST_S = 0.25


class ChatApp(Window):
    """One conversation with one model, on one worker thread."""

    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    def __init__(
        self,
        request: OpenRequest,
        chat: Chat,
        store: Store,
        stage: Stage,
        *,
        sampling: Callable[[SamplingDefaults], SamplingParams] = lambda _: SamplingParams(),
        resume: int | None = None,
        then: str = "",
    ) -> None:
        """`stage` is closed with the app. `sampling`, given the model's recommended defaults, says how to sample;
        `resume` is a stored conversation; `then` is a command to run once the model is open.
        """
        super().__init__()
        self.request = request
        self.chat = chat
        self.keeper = Keeper(chat, store, lambda text: self.post_message(Told(text, kind="error")))
        self.stage = stage
        self.reporter = Screenside(self)
        self.gauges = Gauges()
        self.job: Job[Any] | None = None
        self.answer: Answer | None = None
        self.finished: Finished | None = None
        self._sampling = sampling
        self._resume = resume
        self._then = then
        self._read_s = 0.0  # when the instruments were last read
        self._worked_s = 0.0  # processor time of the screen when it last had to show something
        self._is_leaving = False

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
        self.job = self.stage.open(request, self.reporter)
        self._follow(self.job, self.job, lambda standing: Ready(standing, request, is_new=True))

    def change_draft(self, request: OpenRequest) -> None:
        self.job = self.stage.change_draft(request, self.reporter)
        self._follow(self.job, self.job, lambda standing: Ready(standing, request, is_new=False))

    @work(thread=True)
    def _follow(self, job: Job[Any], events: Iterable[Any], message: Callable[[Any], Message]) -> None:
        """Post what a job yields until it ends, however it does; text once the last is shown, or keys would wait."""
        try:
            for event in events:
                posted = message(event)
                self.post_message(posted)
                if isinstance(posted, Batch):
                    posted.wait(lambda: self.is_running)
        except (Cancelled, Exception) as error:  # noqa: BLE001 - a bug of ours must not take the conversation with it
            self.post_message(told_of(error))
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
        if self.job is not None or self.stage.standing is None:
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
        standing = standing_of(self.stage)
        self.gauges = Gauges(plain=standing.plain_speed, asked_s=perf_counter())
        self.finished = None
        request = self.chat.request()
        self.keeper.begin_answer({"model": standing.name, "draft": standing.draft})
        self.answer = Answer(standing.draft)
        await self.query_one(Log).add(self.answer)
        self.dress()
        self._worked_s = thread_time()
        self.job = self.stage.stream(request)
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
        """An answer under way is stopped first, and kept."""
        self._is_leaving = True
        if self.job is None or self.answer is None:
            self.exit()
        else:
            self.job.cancel()

    def action_help(self) -> None:
        self.push_screen(Help(commands.HELP))

    async def action_details(self) -> None:
        known = await asyncio.to_thread(self.stage.experience) if self.stage.standing is not None else None
        self.push_screen(Details(self.gauges, known))

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
        if perf_counter() - self._read_s >= _READ_EVERY_S:
            self.show_instruments()
        before_s, self._worked_s = self._worked_s, thread_time()
        message.shown(min(_LONGEST_REST_S, (self._worked_s - before_s) * _REST))

    @on(Ready)
    async def _is_open(self, message: Ready) -> None:
        standing = message.standing
        self.request = message.request
        if message.is_new:
            self.chat.sampling = self._sampling(standing.sampling)
        self.keeper.use_model(standing.name)
        await self.say(f"{standing.name} on {standing.backend}, draft {standing.draft}.")
        self.show_instruments()

    @on(Told)
    async def _told(self, message: Told) -> None:
        await self.say(str(message), message.kind)

    @on(Progressed)
    def _progressed(self, message: Progressed) -> None:
        if self.job is not None:
            self.query_one(Progress).show(message.text, message.fraction)

    @on(Ended)
    async def _ended(self, message: Ended) -> None:
        if message.job is not self.job:
            return
        self.query_one(Progress).show(None)
        answer, self.answer = self.answer, None
        if answer is not None:
            metrics = measured(self.finished)
            await answer.finish(foot(metrics))
            self.keeper.finish(answer.text, answer.reasoning, answer.spans, metrics)
            if not answer.text and not answer.reasoning:
                await answer.remove()
        self.job = None
        if self._is_leaving:
            self.exit()
        self.show_instruments()
        then, self._then = self._then, ""
        if then and self.stage.standing is not None:
            await self.run_command(then)

    # What is shown.

    async def show_turns(self) -> None:
        """Draw the conversation anew."""
        await self.query_one(Log).show(self.keeper.turns)
        self.dress()

    def show_instruments(self) -> None:
        self._read_s = perf_counter()
        if (standing := self.stage.standing) is not None:
            now = readings(standing, self.stage.resident)
            self.query_one(Panel).show(self.gauges, now)
            self.query_one(Strip).show(self.gauges, now)

    async def on_unmount(self) -> None:
        self.stage.close()
        self.keeper.close()
