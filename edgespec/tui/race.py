"""The same prompt decoded plainly and speculatively, in turn, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.core.metrics import Metrics
from edgespec.core.protocols import Step
from edgespec.engine.drafting import Speculation
from edgespec.engine.events import Event, Finished, Request
from edgespec.errors import Cancelled
from edgespec.service.client import EngineClient
from edgespec.service.worker import Job
from edgespec.text.stream import Piece
from edgespec.tui.live_stats import LiveStats
from edgespec.tui.messages import toast_of
from edgespec.tui.sanitize import sanitize

FRAME_S = 1 / 30


class Race(ModalScreen[None]):
    """Two columns, one result. Esc stops and closes."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "leave", "Back")]

    def __init__(self, client: EngineClient, request: Request, speculation: Speculation) -> None:
        super().__init__()
        self._client = client
        self._request = request if request.seed is not None else replace(request, seed=1)
        self._lanes = (Lane("plain", Speculation("none", 0)), Lane("speculative", speculation))
        self._job: Job[Event] | None = None
        self._left = False

    def compose(self) -> ComposeResult:
        with Vertical(classes="window") as window:
            window.border_subtitle = "Esc goes back"
            with Horizontal():
                yield from self._lanes
            yield Static("racing: plain decoding first, then speculative", id="race-result", markup=False)

    def on_mount(self) -> None:
        self._run()

    @work(thread=True, exclusive=True)
    def _run(self) -> None:
        try:
            for lane in self._lanes:
                if self._left:
                    return
                self._job = self._client.stream(self._request, lane.speculation)
                for batch in self._job.batches(FRAME_S):
                    self.app.call_from_thread(lane.add, batch)
            self.app.call_from_thread(self._finish)
        except Cancelled:  # before it had begun
            return
        except Exception as error:  # noqa: BLE001 - a bug of ours must not take the conversation with it
            if not self._left:
                self.app.call_from_thread(self._say, str(toast_of(error)))

    def _finish(self) -> None:
        plain, spec = (lane.finished for lane in self._lanes)
        if plain is None or spec is None or "cancelled" in (plain.reason, spec.reason):
            self._say("the race was stopped")
            return
        same = plain.tokens == spec.tokens
        ours, theirs = _seconds(spec.metrics), _seconds(plain.metrics)
        ratio = f"{theirs / ours:.2f}x plain" if ours and theirs else "too short to compare"
        told = "the same text" if same else "the texts part where the target was undecided, or drafts were drawn"
        self._say(f"{ratio}: {ours:.2f} s against {theirs:.2f} s for {len(spec.tokens)} tokens; {told}")

    def _say(self, text: str) -> None:
        self.query_one("#race-result", Static).update(Text(text))

    def action_leave(self) -> None:
        self._left = True
        if self._job is not None:
            self._job.cancel()
        self.dismiss(None)


class Lane(Vertical):
    """One of the two."""

    def __init__(self, title: str, speculation: Speculation) -> None:
        super().__init__(classes="column")
        self.speculation = speculation
        self.finished: Finished | None = None
        self._title = title
        self._gauges = LiveStats()
        self._written = ""
        self._head = Static(title, classes="head", markup=False)
        self._text = Static("", markup=False)

    def compose(self) -> ComposeResult:
        yield self._head
        with VerticalScroll() as follows:
            follows.anchor()
            yield self._text

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Step):
                self._gauges.add(event)
            elif isinstance(event, Piece):
                self._written += sanitize(event.text)
            elif isinstance(event, Finished):
                self.finished = event
        self._text.update(Text(self._written))
        live_stats = self._gauges
        accepted = f", {live_stats.acceptance:.0%} accepted" if live_stats.acceptance is not None else ""
        speed = f"{live_stats.mean:.1f} tok/s" if live_stats.mean else "-"
        self._head.update(Text(f"{self._title}{accepted}\n{live_stats.tokens} tokens, {speed}"))


def _seconds(metrics: Metrics) -> float:
    """From the first token to the last."""
    return (metrics.tpot_s or 0.0) * (metrics.emitted_tokens - 1)
