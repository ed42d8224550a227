"""What the chat shows of its parts: the conversation, the instruments, what is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

from textual.content import Content

from edgespec.controller.stats import DraftStats
from edgespec.errors import EdgespecError
from edgespec.tui.dialogue import Dialogue
from edgespec.tui.messages import Toast
from edgespec.tui.opening import Opening
from edgespec.tui.panel import Panel, StatusLine, read_status
from edgespec.tui.progress import Progress
from edgespec.tui.sanitize import sanitize
from edgespec.tui.transcript import Transcript

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

    async def keep(self, text: str, kind: str = "note") -> None:
        await super().keep(text, kind)
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
            self.query_one(Panel).show(self.activity.stats, status)
            self.query_one(StatusLine).show(self.activity.stats, status)

    def refresh_instruments_sometimes(self) -> None:
        """The same, but not more often than anybody can read."""
        if perf_counter() - self._refreshed_s >= _REFRESH_INTERVAL_S:
            self.refresh_instruments()

    async def action_details(self) -> None:
        from edgespec.tui.details import Details  # not before it is needed: its tables take 50 ms

        self.push_screen(Details(lambda: self.activity.stats, self._read_draft_stats, self.load_notices))

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
