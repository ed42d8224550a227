"""A race of plain and speculative decoding on one prompt, one after the other, side by side."""

from __future__ import annotations

import asyncio
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
from edgespec.service.stream import Stream
from edgespec.text.stream import Piece
from edgespec.tui.live_stats import LiveStats
from edgespec.tui.messages import Toast
from edgespec.tui.sanitize import sanitize

FRAME_S = 1 / 30


class Race(ModalScreen[None]):
    """One column each, and the result below. Esc stops the race and closes the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "close", "Back")]

    def __init__(self, client: EngineClient, request: Request, speculation: Speculation) -> None:
        super().__init__()
        self._client = client
        self._request = request if request.seed is not None else replace(request, seed=1)
        self._lanes = (Lane("plain", Speculation()), Lane("speculative", speculation))
        self._job: Stream[Event] | None = None
        self._is_closed = False

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = "Esc closes"
            with Horizontal():
                yield from self._lanes
            yield Static("Running: plain decoding first, then speculative.", id="race-result", markup=False)

    def on_mount(self) -> None:
        self._run()

    @work(exclusive=True)
    async def _run(self) -> None:
        try:
            for lane in self._lanes:
                if self._is_closed:
                    return
                self._job = self._client.stream(self._request, lane.speculation)
                async for batch in self._job.batches():
                    lane.add(batch)
                    await asyncio.sleep(FRAME_S)
            self._finish()
        except Cancelled:  # before it had begun
            return
        except Exception as error:  # noqa: BLE001 - an internal error must not end the conversation
            if not self._is_closed:
                self._show_result(str(Toast.from_error(error)))

    def _finish(self) -> None:
        plain, speculative = (lane.finished for lane in self._lanes)
        if plain is None or speculative is None or "cancelled" in (plain.reason, speculative.reason):
            self._show_result("The race was stopped.")
            return
        speculative_s, plain_s = _measure_decode(speculative.metrics), _measure_decode(plain.metrics)
        ratio = f"{plain_s / speculative_s:.2f}x plain" if speculative_s and plain_s else "too short to compare"
        texts = "the same text" if plain.tokens == speculative.tokens else "different texts (a near tie, or sampling)"
        self._show_result(
            f"{ratio}: {speculative_s:.2f} s against {plain_s:.2f} s for {len(speculative.tokens)} tokens; {texts}"
        )

    def _show_result(self, text: str) -> None:
        self.query_one("#race-result", Static).update(Text(text))

    def action_close(self) -> None:
        self._is_closed = True
        if self._job is not None:
            self._job.cancel()
        self.dismiss(None)


class Lane(Vertical):
    """The column of one decoding mode."""

    def __init__(self, title: str, speculation: Speculation) -> None:
        super().__init__(classes="lane")
        self.speculation = speculation
        self.finished: Finished | None = None
        self._title = title
        self._stats = LiveStats()
        self._output = ""
        self._header = Static(title, classes="lane-header", markup=False)
        self._text = Static("", markup=False)

    def compose(self) -> ComposeResult:
        yield self._header
        with VerticalScroll() as scroll:
            scroll.anchor()
            yield self._text

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Step):
                self._stats.add(event)
            elif isinstance(event, Piece):
                self._output += sanitize(event.text)
            elif isinstance(event, Finished):
                self.finished = event
        self._text.update(Text(self._output))
        rate, mean = self._stats.acceptance.rate, self._stats.mean_speed
        accepted = "" if rate is None else f", {rate:.0%} accepted"
        speed = f"{mean:.1f} tok/s" if mean else "-"
        self._header.update(Text(f"{self._title}{accepted}\n{self._stats.tokens} tokens, {speed}"))


def _measure_decode(metrics: Metrics) -> float:
    """Seconds from the first token to the last."""
    return (metrics.tpot_s or 0.0) * (metrics.emitted_tokens - 1)
