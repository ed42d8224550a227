"""The full-screen chat: it sends the user's input to an engine client and shows the events that come back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

from textual import on
from textual.app import SystemCommand
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import OptionList

from edgespec.answers.summary import RUNTIMES, describe_drafts
from edgespec.autopilot.stats import DraftStats
from edgespec.chat import Store
from edgespec.chat.own_model import OwnModel
from edgespec.chat.state import Chat
from edgespec.chat.tui import commands
from edgespec.chat.tui.details import Details
from edgespec.chat.tui.dialogue import Dialogue
from edgespec.chat.tui.keys import BINDINGS, Help
from edgespec.chat.tui.panel import describe_memory, describe_reading
from edgespec.chat.tui.progress import Downloads, Progress, TuiReporter, describe_error, describe_wait
from edgespec.chat.tui.prompt import Completion, Prompt
from edgespec.chat.tui.settings import read_setting
from edgespec.chat.tui.transcript import Transcript
from edgespec.client.client import EngineClient
from edgespec.client.stream import Stream
from edgespec.core.sampling import SamplingParams
from edgespec.engine.model_info import ModelInfo
from edgespec.errors import EdgespecError, NotReady
from edgespec.models.load_config import LoadConfig
from edgespec.models.references import LocalPath, parse_reference
from edgespec.models.registry import SamplingDefaults
from edgespec.models.short_names import shorten_names
from edgespec.progress import Reporter

_BEAT_S = 0.2  # between two looks at what is waited for
_MAX_PATHS = 20  # of models that were opened by path


class ChatApp(Dialogue):
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
        is_incognito: bool = False,
        is_choosing: bool = False,
    ) -> None:
        """`sampling` turns a model's recommended defaults into sampling parameters. `resume` is the id of a stored
        conversation. `is_incognito`: nothing of the first conversation is kept. `is_choosing`: a list of small models
        is shown first, of which the user opens one. The app closes `client` when it ends.
        """
        super().__init__(request, chat, store, client)
        self.is_choosing = is_choosing
        self._sampling = sampling
        self._resume = resume
        self._load_notices: Sequence[str] = ()  # of the model, or of its draft
        if is_incognito:
            self.recorder.start_incognito(is_on=True)

    async def on_mount(self) -> None:
        self.query_one("#progress", Progress).set_interval(_BEAT_S, self._beat)
        if self.recorder.store.notice is not None:
            await self.add_notice(self.recorder.store.notice, "error")
            self.is_disk_told = self.recorder.store.is_in_memory
        if self._resume is not None:
            await self.resume(self._resume)
        if self.is_choosing:
            await self.run_command("model")
        else:
            await self.open_model(self.request)
        self.refresh_opening()

    async def _beat(self) -> None:
        if self.activity.answer is not None:
            waited_s = perf_counter() - self.activity.meter.started_s
            self.query_one("#progress", Progress).show(*describe_wait(self.activity, waited_s))
        if (failure := self.client.take_failure()) is not None:
            self.show_failure(describe_error(failure))

    async def show_help(self) -> None:
        self.action_help()

    async def show_stats(self) -> None:
        self.action_details()

    async def leave(self) -> None:
        self.action_leave()

    def action_details(self) -> None:
        finished = self.activity.finished
        losses = [str(finished.loss)] if finished is not None and finished.loss is not None else []
        model_info, meter = self.client.model_info, self.activity.meter
        sizes = [describe_memory(model_info.fit)] if model_info is not None and model_info.fit is not None else []
        notices = [*filter(None, [describe_reading(meter)]), *losses, *sizes, *self._load_notices]
        self.push_screen(Details(lambda: self.activity.meter, self._read_draft_stats, notices))

    async def _read_draft_stats(self) -> DraftStats | None:
        """What the autopilot has learned; None before it has measured, and when no model is open."""
        with suppress(EdgespecError):
            if self.client.model_info is not None:
                return await self.client.draft_stats().wait()
        return None

    # Models.

    async def open_model(self, request: LoadConfig) -> None:
        """Load another model; the conversation stays."""
        self._follow_load(self.client.open, request, is_new=True)

    async def change_draft(self, request: LoadConfig) -> None:
        self._follow_load(self.client.change_draft, request, is_new=False)

    async def choose_model(self) -> None:
        from edgespec.chat.tui.picker import Pick, Picker  # not before it is needed: the planner behind it takes 50 ms

        async def load(pick: Pick | None) -> None:
            if pick is not None and pick.download:
                self.query_one(Downloads).start(replace(self.request, model=pick.model, draft="auto"))
            elif pick is not None:
                await self.run_command(f"model {pick.model}")

        is_idle = self.activity.job is None
        self.push_screen(Picker(self.client, is_idle=is_idle, is_first=self.is_choosing), load)

    def _follow_load(
        self, load: Callable[[LoadConfig, Reporter], Stream[ModelInfo]], request: LoadConfig, *, is_new: bool
    ) -> None:
        reporter = TuiReporter(self.query_one("#progress", Progress))
        job = self.activity.job = load(request, reporter)
        self.follow(job, lambda info: self._show_model(info, request, reporter.notices, is_new=is_new))

    # Input of the user.

    @on(Prompt.Submitted)
    async def _submit(self, message: Prompt.Submitted) -> None:
        if message.text.strip() == "?":
            self.action_help()
        else:
            await self.submit(message.text)

    def complete(self, line: str) -> Sequence[Completion]:
        return commands.complete(line)

    async def run_command(self, line: str) -> None:
        try:
            await commands.run(self, line)
        except EdgespecError as error:
            if isinstance(error, NotReady) and self.activity.job is not None:
                self.queue(f"/{line}")
            else:
                await self.show_error(error)

    action_command = run_command

    def action_stop(self) -> None:
        """Stop the running job or the download; while there is neither, copy the selected text."""
        if self.activity.job is not None:
            self.activity.job.cancel()
        elif self.query_one(Downloads).cancel():
            return
        elif selected := self.screen.get_selected_text():
            self.copy_to_clipboard(selected)

    def action_leave(self) -> None:
        """Quit; an answer under way is stopped and stored first."""
        self._is_leaving = True
        if self.activity.job is None or self.activity.answer is None:
            self.exit()
        else:
            self.activity.job.cancel()

    async def action_reopen(self) -> None:
        """Open the model again, after its process has ended or if it could not be opened."""
        if self.activity.job is None and self.client.model_info is None:
            await self.open_model(self.request)

    @on(OptionList.OptionSelected, "#opening-list")
    async def _begin(self, message: OptionList.OptionSelected) -> None:
        verb, _, what = (message.option_id or "").partition(" ")
        await (self.ask(what) if verb == "send" else self.resume(int(what)))
        self.query_one(Prompt).focus()

    def action_help(self) -> None:
        self.push_screen(Help([(command.usage, command.summary) for command in commands.COMMANDS]))

    async def action_clear_screen(self) -> None:
        """Remove everything from the screen but an answer under way; the conversation stays."""
        self.query_one(Transcript).clear(keep=self.activity.answer)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for command in commands.COMMANDS:
            if not command.requires_argument:
                yield SystemCommand(f"/{command.name}", command.summary, partial(self.run_command, command.name))

    async def _show_model(
        self, model_info: ModelInfo, request: LoadConfig, notices: Sequence[str], *, is_new: bool
    ) -> None:
        self.request, self._load_notices, self.is_choosing = request, notices, False
        if is_new:
            self.chat.sampling = self.chat.default_sampling = self._sampling(model_info.sampling)
            self._remember_model(request)
            self.clear_instruments()  # the numbers are those of another model
        self.query_one(Transcript).drop(self.failures)
        self.failures.clear()
        self.recorder.model = model_info.name
        drafts = describe_drafts(model_info.draft, is_paused=model_info.is_paused)
        await self.show_notice(f"ready: {shorten_names(model_info.name)} on {RUNTIMES[model_info.backend]}, {drafts}.")
        if not self.is_headless:
            gc.freeze()  # a collection that looks at what is there now takes 0.1 s
        self.refresh_instruments()

    def _remember_model(self, request: LoadConfig) -> None:
        """Keep what opens the model for the next start, and a path for the list of models."""
        reference = OwnModel.of(request).reference or ""
        if request.backend is None:
            self.remember("model", reference)
        if reference and request.backend != "toy" and isinstance(parse_reference(reference), LocalPath):
            others = (each for each in read_setting("paths").splitlines() if each != reference)
            self.remember("paths", "\n".join([reference, *others][:_MAX_PATHS]))

    @on(Downloads.Done)
    async def _open_download(self, message: Downloads.Done) -> None:
        if self.activity.job is None and not self.is_racing:
            await self.open_model(message.request)
        else:
            await self.show_notice(f"{message.request.model} is downloaded; Ctrl+G opens it.")

    async def on_unmount(self) -> None:
        self.client.close()
        self.recorder.close()
