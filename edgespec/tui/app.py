"""The full-screen chat: it sends the user's input to an engine client and shows the events that come back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter, thread_time
from typing import Any, ClassVar

from textual import on
from textual.app import SystemCommand
from textual.binding import BindingType
from textual.content import Content
from textual.screen import Screen

from edgespec.controller.stats import DraftStats
from edgespec.conversations import Store
from edgespec.conversations.chat import Chat
from edgespec.conversations.commands import requires_argument
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Notice as EngineNotice
from edgespec.errors import EdgespecError, NotReady
from edgespec.hub.cache import LocalPath, parse_reference, shorten_names
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.registry.schema import EMBEDDED_ALIAS, SamplingDefaults
from edgespec.service.client import EngineClient, ModelInfo, Stream
from edgespec.text.stream import Piece
from edgespec.tui import commands
from edgespec.tui.blocks import may_be_code
from edgespec.tui.dialogue import CONTINUE_HINT, Dialogue, own_model
from edgespec.tui.keys import BINDINGS, Help
from edgespec.tui.messages import Batch, JobEnded, ModelReady, ProgressChanged, Toast, TuiReporter
from edgespec.tui.opening import Opening
from edgespec.tui.panel import Panel, StatusLine, add_metrics, footer_metrics, format_footer, read_status
from edgespec.tui.progress import Downloads, Progress
from edgespec.tui.prompt import Completion, Prompt, sanitize
from edgespec.tui.settings import add_path
from edgespec.tui.transcript import Transcript
from edgespec.tui.turns import Notice

# What the chat shows of its parts: the conversation, the instruments, what is waited for.


_REFRESH_INTERVAL_S = 0.5  # of the instruments, whose drawing costs more than that of an answer's new words
_BEAT_S = 0.2  # between two looks at what is waited for
_INCOGNITO = "incognito: nothing is saved"
_RECENT = 3  # conversations on the opening screen


class ChatView(Dialogue):
    """Reads the engine and the conversation, and changes neither."""

    load_notices: Sequence[str] = ()  # of the model, or of its draft
    _refreshed_s = 0.0  # perf_counter() of the instruments' last refresh

    async def on_mount(self) -> None:
        self.query_one(Progress).set_interval(_BEAT_S, self._beat)
        self.refresh_opening()

    async def add_notice(self, text: str, kind: str = "note") -> None:
        await super().add_notice(text, kind)
        self.refresh_opening()

    def mark_branches(self) -> None:
        super().mark_branches()
        self.refresh_opening()

    def refresh_opening(self) -> None:
        """Show examples and the last conversations in place of an empty conversation; set the titles."""
        turns, transcript = self.recorder.turns, self.query_one(Transcript)
        if not turns:
            recent = []
            with suppress(EdgespecError):
                recent = self.recorder.saved.recent(_RECENT)
            self.query_one(Opening).show(self.client.model_info, recent, is_busy=self.activity.job is not None)
        self.screen_stack[0].set_class(not turns, "opening")
        self.screen_stack[0].set_class(bool(transcript.items), "noticed")
        title, conversation = "New conversation", self.recorder.conversation
        if turns and conversation is not None:
            title = conversation.title if conversation.renamed else turns[0].text.strip().split("\n")[0]
        pane = self.query_one("#pane")
        pane.border_title = Content(sanitize(f"Incognito · {title}" if self.is_incognito else title))
        is_saved = not self.recorder.saved.is_in_memory
        pane.border_subtitle = Content(_INCOGNITO if self.is_incognito else "" if is_saved else "not saved")

    def refresh_instruments(self) -> None:
        """Show the current statistics in the panel and the status line."""
        self._refreshed_s = perf_counter()
        self.refresh_opening()
        if (model_info := self.client.model_info) is not None:
            status = read_status(model_info, self.client.resident, is_incognito=self.is_incognito)
            self.query_one(Panel).show(self.activity.meter, status)
            self.query_one(StatusLine).show(self.activity.meter, status)

    def refresh_instruments_sometimes(self) -> None:
        """Show the statistics, at most once in _REFRESH_INTERVAL_S."""
        if perf_counter() - self._refreshed_s >= _REFRESH_INTERVAL_S:
            self.refresh_instruments()

    async def action_details(self) -> None:
        from edgespec.tui.panel import Details  # not before it is needed: its tables take 50 ms

        self.push_screen(Details(lambda: self.activity.meter, self._read_draft_stats, self.load_notices))

    async def _read_draft_stats(self) -> DraftStats | None:
        """What the autopilot has learned; None before it has measured, and where no model is open."""
        with suppress(EdgespecError):
            if self.client.model_info is not None:
                return await self.client.draft_stats().wait()
        return None

    def _beat(self) -> None:
        self.query_one(Progress).show_answer(self.activity)
        if (failure := self.client.take_failure()) is not None:
            self.post_message(Toast.from_error(failure, stays=True))
            self.refresh_opening()


class ChatApp(ChatView):
    """One conversation with one model at a time."""

    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    def __init__(
        self,
        request: LoadConfig,
        chat: Chat,
        store: Store,
        client: EngineClient,
        *,
        sampling: Callable[[SamplingDefaults], SamplingParams] = lambda _: SamplingParams(),
        resume: int | None = None,
        then: str = "",
        is_incognito: bool = False,
        is_choosing: bool = False,
    ) -> None:
        """`sampling` turns a model's recommended defaults into sampling parameters. `resume` is the id of a stored
        conversation. `then` is a command to run once the model is loaded. `is_incognito`: nothing of the first
        conversation is kept. `is_choosing`: a list of small models is shown first, of which the user opens one. The
        app closes `client` when it ends.
        """
        super().__init__(request, chat, store, client)
        self.is_choosing = is_choosing
        self._sampling = sampling
        self._resume = resume
        self._then = then
        self._is_leaving = False
        self._advice: Notice | None = None  # at the end of the conversation
        if is_incognito:
            self.recorder.start_incognito(is_on=True)

    @property
    def reporter(self) -> TuiReporter:
        """A new one, which shows the progress of a load on this screen."""
        return TuiReporter(self)

    async def on_mount(self) -> None:
        if self.recorder.store.notice is not None:
            await self.add_notice(self.recorder.store.notice, "error")
        if self._resume is not None:
            await self.resume(self._resume)
        if self.is_choosing:
            await self.run_command("model")
        else:
            self.open(self.request)

    # Jobs. What reads them only posts messages.

    def open(self, request: LoadConfig) -> None:
        """Load another model; the conversation stays."""
        self._follow_load(self.client.open, request, is_new=True)

    def change_draft(self, request: LoadConfig) -> None:
        """Load another draft for the same model."""
        self._follow_load(self.client.change_draft, request, is_new=False)

    def _follow_load(
        self, load: Callable[[LoadConfig, Reporter], Stream[ModelInfo]], request: LoadConfig, *, is_new: bool
    ) -> None:
        reporter = self.reporter
        job = self.activity.job = load(request, reporter)
        self.follow(job, job, lambda info: ModelReady(info, request, reporter.notices, is_new=is_new))

    # Input of the user.

    @on(Prompt.Submitted)
    async def _submit(self, message: Prompt.Submitted) -> None:
        if message.text.strip() == "?":
            self.action_help()
        else:
            await self.submit(message.text)

    def complete(self, line: str) -> Sequence[Completion]:
        return commands.complete(line, self.available_themes)

    async def run_command(self, line: str) -> None:
        try:
            await commands.run(self, line)
        except EdgespecError as error:
            if isinstance(error, NotReady) and self.activity.is_loading:
                self.queue(f"/{line}")
            else:
                await self.show_error(error)

    async def action_command(self, line: str) -> None:
        await self.run_command(line)

    def action_stop(self) -> None:
        """Stop the running job or the download; while there is neither, copy the selected text."""
        if self.activity.job is not None:
            self.activity.job.cancel()
        elif self.query_one(Downloads).cancel():
            return
        elif selected := self.screen.get_selected_text():
            self.copy_to_clipboard(selected)

    @on(Prompt.QuitRequested)
    def action_leave(self) -> None:
        """Quit; an answer under way is stopped and stored first."""
        self._is_leaving = True
        if self.activity.job is None or self.activity.answer is None:
            self.exit()
        else:
            self.activity.job.cancel()

    def action_reopen(self) -> None:
        """Open the model again, after its process has ended or where it could not be opened."""
        if self.activity.job is None and self.client.model_info is None:
            self.open(self.request)

    @on(Opening.Chosen)
    async def _begin(self, message: Opening.Chosen) -> None:
        await (self.ask(message.text) if message.id is None else self.resume(message.id))
        self.query_one(Prompt).focus()

    def action_help(self) -> None:
        self.push_screen(Help(commands.HELP))

    async def action_clear_screen(self) -> None:
        """Remove everything from the screen but an answer under way; the conversation stays."""
        self.query_one(Transcript).clear(keep=self.activity.answer)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for command in commands.COMMANDS:
            if not requires_argument(command):
                yield SystemCommand(f"/{command.name}", command.summary, partial(self.run_command, command.name))

    # Messages of jobs.

    @on(Batch)
    async def _show_batch(self, message: Batch) -> None:
        for event in message.events:
            self.activity.add(event)
            if isinstance(event, EngineNotice):
                await self.show_notice(event.text)
        pieces = [event for event in message.events if isinstance(event, Piece)]
        if (answer := self.activity.answer) is not None and pieces:
            answer.append(pieces)
            self.query_one(Transcript).update(answer)
            self.recorder.update_answer(answer.text, answer.reasoning, lambda: answer.spans)
        await self.watch_context()
        self.refresh_instruments_sometimes()
        before_s, self._drawn_cpu_s = self._drawn_cpu_s, thread_time()
        message.mark_shown(self._drawn_cpu_s - before_s)

    @on(ModelReady)
    async def _show_model(self, message: ModelReady) -> None:
        model_info = message.model_info
        self.request, self.load_notices, self.is_choosing = message.request, message.notices, False
        if message.is_new:
            self.chat.sampling = self._sampling(model_info.sampling)
            self._remember_model(message.request)
        self.recorder.use_model(model_info.name)
        name, draft = shorten_names(model_info.name), shorten_names(model_info.draft)
        await self.show_notice(f"{name} on {model_info.backend}, draft {draft}.")
        if not self.is_headless:
            gc.freeze()  # a collection that looks at what is there now takes 0.1 s
        self.refresh_instruments()

    def _remember_model(self, request: LoadConfig) -> None:
        """Keep what opens the model for the next start, and a path for the list of models."""
        reference = own_model(request).reference or ""
        if request.backend is None:
            self.remember("model", reference)
        if reference and request.backend != "toy" and isinstance(parse_reference(reference), LocalPath):
            self.remember("paths", add_path(self._settings.read("paths"), reference))

    @on(Toast)
    async def _show_toast(self, message: Toast) -> None:
        await (self.add_notice if message.stays else self.show_notice)(str(message), message.kind)

    @on(ProgressChanged)
    def _show_progress(self, message: ProgressChanged) -> None:
        if self.activity.job is not None:
            self.query_one(Progress).show(message.text, message.fraction)

    @on(Downloads.Done)
    async def _open_download(self, message: Downloads.Done) -> None:
        if self.activity.job is None:
            self.open(message.request)
        else:
            await self.show_notice(f"{message.request.model} is downloaded; Ctrl+G opens it.")

    @on(JobEnded)
    async def _end_job(self, message: JobEnded) -> None:
        activity = self.activity
        if message.job is not activity.job:
            return
        self.query_one(Progress).show(None)
        answer, activity.answer = activity.answer, None
        if answer is not None:
            metrics = add_metrics(activity.earlier, footer_metrics(activity.finished))
            is_whole = metrics.get("reason") == "stop"
            answer.footer = format_footer(metrics) + ("" if is_whole else CONTINUE_HINT)
            self.query_one(Transcript).update(answer)
            self.recorder.finish_answer(answer.text, answer.reasoning, answer.spans, metrics)
            if not answer.text and not answer.reasoning:
                await self.drop_answer(answer)
        activity.job = None
        self._advise(answered=answer is not None)
        if self._is_leaving:
            self.exit()
        self.refresh_instruments()
        then, self._then = self._then, ""
        if then and self.client.model_info is not None:
            await self.run_command(then)
        if not self._is_leaving:
            await self.send_next()

    def _advise(self, *, answered: bool) -> None:
        """Name the next step below the conversation: where its model is not open, or only completes code.

        It replaces what was said there before.
        """
        transcript, conversation = self.query_one(Transcript), self.recorder.conversation
        if self._advice is not None:
            transcript.drop(self._advice)
            self._advice = None
        if conversation is None:
            return
        model_info = self.client.model_info
        if model_info is None:
            said = f"{conversation.model}, the model of this conversation, is not open; Ctrl+G lists models."
        elif answered and model_info.name == EMBEDDED_ALIAS and not may_be_code(self.recorder.questions[-1].text):
            said = f"{EMBEDDED_ALIAS} completes Python code; Ctrl+G lists models that one can talk to."
        else:
            return
        self._advice = Notice(said)
        transcript.add(self._advice)

    async def on_unmount(self) -> None:
        self.client.close()
        self.recorder.close()
