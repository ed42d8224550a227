"""The chat on the whole screen. It shows what the engine says and holds no engine logic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter, thread_time
from typing import Any, ClassVar, Protocol

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
from edgespec.planner.plan import LoadConfig
from edgespec.registry.schema import SamplingDefaults
from edgespec.service.client import EngineClient, require_model
from edgespec.service.worker import Job
from edgespec.text.stream import Piece
from edgespec.tui.details import Details
from edgespec.tui.footer import footer_metrics, format_footer
from edgespec.tui.help import Help
from edgespec.tui.keys import BINDINGS
from edgespec.tui.live_stats import LiveStats
from edgespec.tui.log import Log
from edgespec.tui.messages import Batch, Ended, Progressed, Ready, Toast, toast_of
from edgespec.tui.panel import Panel, Strip, readings
from edgespec.tui.progress import Progress
from edgespec.tui.prompt import Prompt
from edgespec.tui.race import FRAME_S
from edgespec.tui.recorder import ConversationRecorder
from edgespec.tui.reporter import TuiReporter
from edgespec.tui.themes import HIGH_CONTRAST
from edgespec.tui.turns import Answer, UserMessage
from edgespec.tui.window import Window

_READ_EVERY_S = 0.1
# What the engine decodes on may be all that this machine has, so the screen takes an eighth of a processor at most.
_REST = 7  # times what a frame took
_LONGEST_REST_S = 0.25


class CommandSet(Protocol):
    """What can be typed after a slash."""

    help: str  # a line for each command

    async def run(self, app: ChatApp, line: str) -> None:
        """Run `line`, which comes without its slash, or tell the user what is wrong with it."""

    def without_arguments(self) -> Iterable[tuple[str, str]]:
        """(name, summary) of the commands that need no argument."""


class ChatApp(Window):
    """One conversation with one model, on one worker thread."""

    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    def __init__(
        self,
        request: LoadConfig,
        chat: Chat,
        store: Store,
        client: EngineClient,
        commands: CommandSet,
        *,
        sampling: Callable[[SamplingDefaults], SamplingParams] = lambda _: SamplingParams(),
        resume: int | None = None,
        then: str = "",
    ) -> None:
        """`client` is closed with the app. `sampling`, given the model's recommended defaults, says how to sample;
        `resume` is a stored conversation; `then` is a command to run once the model is open.
        """
        super().__init__()
        self.request = request
        self.chat = chat
        self.recorder = ConversationRecorder(chat, store, lambda text: self.post_message(Toast(text, kind="error")))
        self.client = client
        self.commands = commands
        self.reporter = TuiReporter(self)
        self.live_stats = LiveStats()
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
        if self.recorder.store.notice is not None:
            await self.say(self.recorder.store.notice, "error")
        if self._resume is not None:
            await self.resume(self._resume)
        self.open(self.request)

    # What workers do: they only post messages.

    def open(self, request: LoadConfig) -> None:
        """Open a model; the conversation stays."""
        self.job = self.client.open(request, self.reporter)
        self._follow(self.job, self.job, lambda model_info: Ready(model_info, request, is_new=True))

    def change_draft(self, request: LoadConfig) -> None:
        self.job = self.client.change_draft(request, self.reporter)
        self._follow(self.job, self.job, lambda model_info: Ready(model_info, request, is_new=False))

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
            self.post_message(toast_of(error))
        self.post_message(Ended(job))

    # What the user does.

    @on(Prompt.Sent)
    async def _sent(self, message: Prompt.Sent) -> None:
        if message.text.startswith("/"):
            await self.run_command(message.text[1:])
        else:
            await self.ask(message.text)

    async def run_command(self, line: str) -> None:
        await self.commands.run(self, line)

    async def action_command(self, line: str) -> None:
        await self.run_command(line)

    async def ask(self, text: str) -> None:
        """Send `text` and have it answered."""
        if self.job is not None or self.client.model_info is None:
            self.query_one(Prompt).put(text)
            why = "wait for what is under way; Esc stops it." if self.job else "no model is open; /model chooses one."
            await self.say(why, "error")
            return
        self.recorder.ask(text)
        log = self.query_one(Log)
        await log.add(UserMessage(text, len(self.recorder.questions)))
        log.anchor()
        await self.generate()

    async def generate(self) -> None:
        """Answer the conversation as it stands."""
        model_info = require_model(self.client)
        self.live_stats = LiveStats(plain=model_info.plain_speed, asked_s=perf_counter())
        self.finished = None
        request = self.chat.request()
        self.recorder.begin_answer({"model": model_info.name, "draft": model_info.draft})
        self.answer = Answer(model_info.draft)
        await self.query_one(Log).add(self.answer)
        self.apply_width()
        self._worked_s = thread_time()
        self.job = self.client.stream(request)
        self._follow(self.job, self.job.batches(FRAME_S), Batch)

    async def resume(self, id: int) -> None:
        """Show a stored conversation and go on with it."""
        try:
            self.recorder.resume(id)
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
        self.push_screen(Help(self.commands.help))

    async def action_details(self) -> None:
        known = await asyncio.to_thread(self.client.draft_stats) if self.client.model_info is not None else None
        self.push_screen(Details(self.live_stats, known))

    async def action_clear_screen(self) -> None:
        """The conversation stays; an answer under way stays on the screen too."""
        await self.query_one(Log).clear(besides=self.answer)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for name, summary in self.commands.without_arguments():
            yield SystemCommand(f"/{name}", summary, partial(self.run_command, name))

    # What workers said.

    @on(Batch)
    async def _batch(self, message: Batch) -> None:
        pieces: list[Piece] = []
        for event in message.events:
            if isinstance(event, Step):
                self.live_stats.add(event)
            elif isinstance(event, Piece):
                pieces.append(event)
            elif isinstance(event, PrefillProgress):
                self.live_stats.read(event)
            elif isinstance(event, EngineNotice):
                await self.say(event.text)
            elif isinstance(event, Finished):
                self.finished = event
        self.query_one(Progress).show(*self.live_stats.reading)
        if (answer := self.answer) is not None and pieces:
            await answer.grow(pieces)
            self.recorder.grow(answer.text, answer.reasoning, lambda: answer.spans)
        if perf_counter() - self._read_s >= _READ_EVERY_S:
            self.show_instruments()
        before_s, self._worked_s = self._worked_s, thread_time()
        message.shown(min(_LONGEST_REST_S, (self._worked_s - before_s) * _REST))

    @on(Ready)
    async def _is_open(self, message: Ready) -> None:
        model_info = message.model_info
        self.request = message.request
        if message.is_new:
            self.chat.sampling = self._sampling(model_info.sampling)
        self.recorder.use_model(model_info.name)
        await self.say(f"{model_info.name} on {model_info.backend}, draft {model_info.draft}.")
        self.show_instruments()

    @on(Toast)
    async def _told(self, message: Toast) -> None:
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
            metrics = footer_metrics(self.finished)
            await answer.finish(format_footer(metrics))
            self.recorder.finish(answer.text, answer.reasoning, answer.spans, metrics)
            if not answer.text and not answer.reasoning:
                await answer.remove()
        self.job = None
        if self._is_leaving:
            self.exit()
        self.show_instruments()
        then, self._then = self._then, ""
        if then and self.client.model_info is not None:
            await self.run_command(then)

    # What is shown.

    async def show_turns(self) -> None:
        """Draw the conversation anew."""
        await self.query_one(Log).show(self.recorder.turns)
        self.apply_width()

    def show_instruments(self) -> None:
        self._read_s = perf_counter()
        if (model_info := self.client.model_info) is not None:
            now = readings(model_info, self.client.resident)
            self.query_one(Panel).show(self.live_stats, now)
            self.query_one(Strip).show(self.live_stats, now)

    async def on_unmount(self) -> None:
        self.client.close()
        self.recorder.close()
