"""Hidden states of a session's tokens, kept for a trained head until it has read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

A = TypeVar("A")  # an array with rows: numpy's or MLX's
MAX_KEPT = 2048  # rows; of a long prompt a head that is not asked would keep hundreds of MB


class Features(Generic[A]):
    """Rows [width] of the tokens in a session's cache, from position `start` on.

    The session appends them as it commits tokens and drops them as it is rewound; the head takes and releases them.
    Those more than 2,048 positions back are released too: a head that has not read them begins behind them.
    """

    def __init__(self, join: Callable[[Sequence[A]], A]) -> None:
        """`join` concatenates arrays along their rows."""
        self._join = join
        self._chunks = deque[tuple[int, A]]()  # (position of the first row, [n, width])
        self._checkpoint: tuple[int, A] | None = None  # a position, and the row before it
        self.start = self.end = 0

    def append(self, rows: A, n: int) -> None:
        """Keep `rows` [n, width], which must stay valid, for `n` more positions."""
        if n:
            self._chunks.append((self.end, rows))
            self.end += n
            self.release(self.end - MAX_KEPT)

    def checkpoint(self) -> None:
        """`rewind` may go back to the present end, and then has the row before it, released or not."""
        if self.start < self.end:
            self._checkpoint = self.end, self._join([self.take(self.end - 1, self.end)])

    def rewind(self, position: int) -> None:
        while self._chunks and self._chunks[-1][0] >= position:
            self._chunks.pop()
        if self._chunks and position < self.end:
            first, rows = self._chunks[-1]
            self._chunks[-1] = first, rows[: position - first]  # type: ignore[index]
        self.end = min(self.end, position)
        self.start = min(self.start, self.end)
        if self._checkpoint is not None and position < self._checkpoint[0]:
            self._checkpoint = None
        if self._checkpoint is not None and self.start == position == self._checkpoint[0]:
            self._chunks.append((position - 1, self._checkpoint[1]))
            self.start = position - 1

    def skip_to(self, position: int) -> None:
        """Hold no rows; the next ones are those from `position` on."""
        self._chunks.clear()
        self._checkpoint = None
        self.start = self.end = position

    def take(self, first: int, last: int) -> A:
        """[last - first, width]. Raises ValueError for positions that are not kept."""
        if not self.start <= first < last <= self.end:
            raise ValueError(f"rows {first} to {last} are not among those kept, {self.start} to {self.end}")
        found = []
        for at, rows in self._chunks:
            low, high = max(first - at, 0), last - at
            if high > 0 and low < len(rows):  # type: ignore[arg-type]
                found.append(rows[low:high])  # type: ignore[index]
        return found[0] if len(found) == 1 else self._join(found)

    def release(self, position: int) -> None:
        position = min(position, self.end)
        while self._chunks and self._chunks[0][0] + len(self._chunks[0][1]) <= position:  # type: ignore[arg-type]
            self._chunks.popleft()
        self.start = max(self.start, position)
