"""When the tokens of two answers were there, and what that says of their speeds; no widgets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from edgespec.core.protocols import Step
from edgespec.units import count


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
