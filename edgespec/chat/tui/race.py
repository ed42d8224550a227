"""A race of plain and speculative decoding on one prompt, side by side: plain as expected, then as measured."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.autopilot.speculation import Speculation
from edgespec.chat.tui.progress import Activity, describe_error
from edgespec.chat.tui.prompt import sanitize
from edgespec.client.client import EngineClient
from edgespec.client.stream import Stream
from edgespec.core.protocols import Step
from edgespec.engine.events import Event, Request
from edgespec.text.stream import Piece
from edgespec.units import count

Steps = Sequence[Step]
FRAME_S = 1 / 30


def describe_race(plain: Sequence[int], fast: Sequence[int], plain_steps: Steps, fast_steps: Steps) -> str:
    """The ratio of the speeds over as many tokens of both answers, `plain` and `fast`, by the times of their steps."""
    n = min(len(plain), len(fast))
    same = next((i for i in range(n) if plain[i] != fast[i]), n)
    is_same = same == len(plain) == len(fast)
    texts = "the same text" if is_same else f"the texts differ after token {same:,} (a near tie)"
    slow_s, fast_s = (_seconds_to(n, steps) for steps in (plain_steps, fast_steps))
    if not slow_s or not fast_s:
        return f"Too short to compare: {count(n, 'token')}; {texts}"
    speeds = f"{(n - 1) / fast_s:.1f} against {(n - 1) / slow_s:.1f} tok/s"
    return f"{slow_s / fast_s:.2f}x plain over {n:,} tokens: {speeds}; {texts}"


def _seconds_to(n: int, steps: Steps) -> float:
    """The time from the first token to the n-th, which may be the first."""
    totals = accumulate(len(step.tokens) for step in steps)
    return next((step.at_s - steps[0].at_s for step, total in zip(steps, totals, strict=True) if total >= n), 0.0)


class Race(ModalScreen[None]):
    """One column each, and the result below. Esc stops the race and closes the screen.

    Speculative decoding runs first; beside it the text appears at the pace of plain decoding as it was measured before.
    Then plain decoding runs itself.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Back")]

    def __init__(
        self, client: EngineClient, request: Request, speculation: Speculation, plain_speed: float | None
    ) -> None:
        """`plain_speed` is in tokens/s; None if it was not measured.

        Both sides take one seed and accept a draft by what the target samples, which gives both the same text.
        """
        super().__init__()
        self._client = client
        self._request = request if request.seed is not None else replace(request, seed=1)
        self._plain = Lane("plain", Speculation())
        self._fast = Lane("speculative", replace(speculation, acceptance="sample"))
        self._plain_speed = plain_speed

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = "Esc closes"
            with Horizontal():
                yield self._plain
                yield self._fast
            yield Static(
                "Running: speculative decoding; plain decoding is verified next.", id="race-result", markup=False
            )

    def on_mount(self) -> None:
        self._run()

    @work(exit_on_error=False)  # it is cancelled when the screen is closed
    async def _run(self) -> None:
        try:
            for lane in (self._fast, self._plain):
                await self._follow(lane, self._client.stream(self._request, lane.speculation))
            plain, fast = self._plain.activity, self._fast.activity
            assert plain.finished is not None and fast.finished is not None
            ends = plain.finished.tokens, fast.finished.tokens
            said = describe_race(*ends, plain.meter.steps, fast.meter.steps)
        except Exception as error:  # noqa: BLE001 - an internal error must not end the conversation
            said = describe_error(error)
        self.query_one("#race-result", Static).update(Text(said))

    async def _follow(self, lane: Lane, job: Stream[Event]) -> None:
        """Show one side; cancels the job when the screen is closed."""
        try:
            async for batch in job.batches():
                lane.add(batch)
                if lane is self._fast:
                    self._plain.expect(lane, self._plain_speed)
                await asyncio.sleep(FRAME_S)
        finally:
            job.cancel()


class Lane(Vertical):
    """The column of one decoding mode."""

    def __init__(self, title: str, speculation: Speculation) -> None:
        super().__init__(classes="lane")
        self.speculation = speculation
        self.activity = Activity()
        self._title = title
        self._marks: list[tuple[int, int]] = []  # tokens so far, and the characters that they were
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
            self.activity.add(event)
            if isinstance(event, Piece):
                self._output += sanitize(event.text)
        meter = self.activity.meter
        self._marks.append((meter.emitted_tokens, len(self._output)))
        self._text.update(Text(self._output))
        rate, speed = meter.acceptance_rate, meter.tokens_per_second
        accepted = "" if rate is None else f", {rate:.0%} accepted"
        shown = f"{speed:.1f} tok/s" if speed else "-"
        self._header.update(Text(f"{self._title}{accepted}\n{meter.emitted_tokens} tokens, {shown}"))

    def expect(self, other: Lane, speed: float | None) -> None:
        """Show as much of the other lane's text as `speed` tokens/s would have written by now, if that is known."""
        meter = other.activity.meter
        speed = meter.plain_tokens_per_second or speed
        if speed and meter.steps:
            n = min(1 + int((meter.steps[-1].at_s - meter.steps[0].at_s) * speed), meter.emitted_tokens)
            self._text.update(Text(other.text_of(n), "dim"))
            self._header.update(Text(f"{self._title}, expected\n{n} tokens, {speed:.1f} tok/s", "dim"))

    def text_of(self, n: int) -> str:
        """The text as it was last shown with at most `n` tokens."""
        place = bisect_right(self._marks, n, key=lambda mark: mark[0])
        return self._output[: self._marks[place - 1][1]] if place else ""
