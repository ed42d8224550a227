"""A race of plain and speculative decoding on one prompt, side by side: plain as expected, then as measured."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.core.protocols import Step
from edgespec.engine.drafting import Speculation
from edgespec.engine.events import Event, Finished, Request
from edgespec.errors import Cancelled
from edgespec.service.client import EngineClient, Stream
from edgespec.text.stream import Piece
from edgespec.tui.live_stats import LiveStats
from edgespec.tui.messages import FRAME_S, Toast
from edgespec.tui.prompt import sanitize
from edgespec.units import count

# When the tokens of two answers were there, and what that says of their speeds; no widgets.


class LaneClock:
    """Of one answer: seconds after its first token, and what the screen held then."""

    def __init__(self) -> None:
        self._started_s = 0.0
        self._seconds: list[float] = []
        self._tokens: list[int] = []  # at that time, in all
        self._marks: list[tuple[int, int]] = []  # (tokens, characters)

    @property
    def tokens(self) -> int:
        return self._tokens[-1] if self._tokens else 0

    @property
    def seconds(self) -> float:
        """From the first token to the last one."""
        return self._seconds[-1] if self._seconds else 0.0

    def add(self, step: Step) -> None:
        """Add the next step."""
        if not self._seconds:
            self._started_s = step.at_s
        self._seconds.append(step.at_s - self._started_s)
        self._tokens.append(self.tokens + len(step.tokens))

    def mark(self, characters: int) -> None:
        """The text of the tokens so far has `characters`."""
        self._marks.append((self.tokens, characters))

    def seconds_to(self, n: int) -> float:
        """From the first token to the n-th. Raises IndexError for more tokens than there are."""
        return self._seconds[bisect_left(self._tokens, n)]

    def characters_of(self, n: int) -> int:
        """Of the text that was marked last with at most `n` tokens."""
        place = bisect_right(self._marks, n, key=lambda mark: mark[0])
        return self._marks[place - 1][1] if place else 0


def describe_race(plain: Sequence[int], fast: Sequence[int], plain_clock: LaneClock, fast_clock: LaneClock) -> str:
    """The ratio of the speeds over as many tokens of both answers, `plain` and `fast`, by their clocks."""
    n = min(len(plain), len(fast))
    same = next((i for i in range(n) if plain[i] != fast[i]), n)
    is_same = same == len(plain) == len(fast)
    texts = "the same text" if is_same else f"the texts differ after token {same:,} (a near tie)"
    slow_s, fast_s = (clock.seconds_to(n) if n else 0.0 for clock in (plain_clock, fast_clock))
    if not slow_s or not fast_s:
        return f"Too short to compare: {count(n, 'token')}; {texts}"
    speeds = f"{(n - 1) / fast_s:.1f} against {(n - 1) / slow_s:.1f} tok/s"
    return f"{slow_s / fast_s:.2f}x plain over {n:,} tokens: {speeds}; {texts}"


class Race(ModalScreen[None]):
    """One column each, and the result below. Esc stops the race and closes the screen.

    Speculative decoding runs first; beside it the text appears at the pace of plain decoding as it was measured before.
    Then plain decoding runs itself.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "close", "Back")]

    def __init__(
        self, client: EngineClient, request: Request, speculation: Speculation, plain_speed: float | None
    ) -> None:
        """`plain_speed` is in tokens/s; None where it was not measured.

        Both sides take one seed and accept a draft by what the target samples, which gives both the same text.
        """
        super().__init__()
        self._client = client
        self._request = request if request.seed is not None else replace(request, seed=1)
        self._plain = Lane("plain", Speculation())
        self._fast = Lane("speculative", replace(speculation, acceptance="sample"))
        self._plain_speed = plain_speed
        self._job: Stream[Event] | None = None
        self._is_closed = False

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

    @work(exclusive=True)
    async def _run(self) -> None:
        try:
            for lane in (self._fast, self._plain):
                if self._is_closed:
                    return
                self._job = self._client.stream(self._request, lane.speculation)
                async for batch in self._job.batches():
                    lane.add(batch)
                    if lane is self._fast:
                        self._plain.expect(lane, self._plain_speed)
                    await asyncio.sleep(FRAME_S)
            self._finish()
        except Cancelled:  # before it had begun
            return
        except Exception as error:  # noqa: BLE001 - an internal error must not end the conversation
            if not self._is_closed:
                self._show_result(str(Toast.from_error(error)))

    def _finish(self) -> None:
        plain, fast = self._plain.finished, self._fast.finished
        if plain is None or fast is None or "cancelled" in (plain.reason, fast.reason):
            self._show_result("The race was stopped.")
            return
        self._show_result(describe_race(plain.tokens, fast.tokens, self._plain.clock, self._fast.clock))

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
        self.clock = LaneClock()
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
                self.clock.add(event)
            elif isinstance(event, Piece):
                self._output += sanitize(event.text)
            elif isinstance(event, Finished):
                self.finished = event
        self.clock.mark(len(self._output))
        self._text.update(Text(self._output))
        rate, mean = self._stats.acceptance.rate, self._stats.mean_speed
        accepted = "" if rate is None else f", {rate:.0%} accepted"
        speed = f"{mean:.1f} tok/s" if mean else "-"
        self._header.update(Text(f"{self._title}{accepted}\n{self._stats.tokens} tokens, {speed}"))

    def expect(self, other: Lane, speed: float | None) -> None:
        """Show as much of the other lane's text as `speed` tokens/s would have written by now, if that is known."""
        speed = other._stats.plain_speed or speed
        if speed and other.clock.tokens:
            n = min(1 + int(other.clock.seconds * speed), other.clock.tokens)
            self._text.update(Text(other._output[: other.clock.characters_of(n)], "dim"))
            self._header.update(Text(f"{self._title}, expected\n{n} tokens, {speed:.1f} tok/s", "dim"))
