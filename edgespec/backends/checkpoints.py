"""Checkpoints of a cache that cannot be cut everywhere."""

from __future__ import annotations

from typing import Generic, TypeVar

_MAX_CHECKPOINTS = 8  # checkpoints of a text
_CHECKPOINT_BYTES = 2**28  # bytes that they may take; the last one is kept even if it takes more
_SPACING = 2048  # tokens between two, while a prompt is read
S = TypeVar("S")


class Checkpoints(Generic[S]):
    """States of a cache by their positions in its text, for caches that cannot drop just any tail.

    The last one is always kept. Of many, those near the end of the text are kept closer together than earlier ones.
    """

    def __init__(self) -> None:
        self._states: list[tuple[int, S]] = []
        self._passing: tuple[int, S] | None = None

    def keep_for_now(self, position: int, state: S) -> None:
        """Keep the state after `position` tokens until the next call of this method."""
        self._passing = position, state

    def add(self, position: int, state: S, n_bytes: int) -> None:
        """Keep the state of `n_bytes` after `position` tokens, and those before it."""
        self.cut(position - 1)
        self._states.append((position, state))
        while len(self._states) > max(1, min(_MAX_CHECKPOINTS, _CHECKPOINT_BYTES // max(n_bytes, 1))):
            at = [0, *(each for each, _ in self._states)]
            gaps = [(at[i + 1] - at[i - 1]) / (position - at[i]) for i in range(1, len(at) - 1)]
            del self._states[gaps.index(min(gaps))]

    def is_due(self, position: int) -> bool:
        """Whether a prompt that has been read up to `position` should get another one."""
        return position >= _SPACING + (self._states[-1][0] if self._states else 0)

    def cut(self, position: int) -> tuple[int, S] | None:
        """Drop what lies behind `position`; returns the last state that is left, with its position."""
        while self._states and self._states[-1][0] > position:
            self._states.pop()
        if self._passing is not None and self._passing[0] > position:
            self._passing = None
        kept = [*self._states[-1:], *([self._passing] if self._passing is not None else [])]
        return max(kept, key=lambda each: each[0], default=None)

    def clear(self) -> None:
        self._states.clear()
        self._passing = None
