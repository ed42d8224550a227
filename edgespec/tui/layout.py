"""Which block of which item is at which line, where only the blocks near the window have been laid out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

from edgespec.tui.blocks import Block
from edgespec.tui.turns import Item

Measure = Callable[[Item, Block], int]
"""The exact number of a block's rows."""


class Slot:
    """One item, with the heights of its blocks, in rows: exact ones, or estimates until a block is measured."""

    def __init__(self, serial: int, item: Item) -> None:
        self.serial = serial
        self.item = item
        self.blocks: list[Block] = []
        self.heights: list[int] = []
        self.is_exact: list[bool] = []
        self.tops: list[int] = [0]  # of the blocks, and at the end the height of the item

    def update(self, width: int) -> int:
        """Take the item's blocks as they are now. Those that are as before keep their heights.

        Returns the top of the first block that is another one.
        """
        blocks = self.item.blocks
        n = 0
        for before, now in zip(self.blocks, blocks, strict=False):
            if before is not now and before != now:
                break
            n += 1
        self.blocks[n:] = blocks[n:]
        self.heights[n:] = [block.estimate(width) for block in blocks[n:]]
        self.is_exact[n:] = [False] * (len(blocks) - n)
        self.tops = [0, *accumulate(self.heights)]
        return self.tops[n]

    def reset(self, width: int) -> None:
        """Forget all heights."""
        self.blocks = []
        self.update(width)


@dataclass(frozen=True, slots=True)
class Place:
    """A row of a block, by the indices of its slot, of the block in the slot, and of the row in the block."""

    slot: int
    block: int
    row: int


class Layout:
    """The items from top to bottom, at `width` columns."""

    def __init__(self) -> None:
        self.width = 1
        self.slots: list[Slot] = []
        self._tops: list[int] = [0]  # of the slots, and at the end the height of all
        self._serials = count()

    @property
    def height(self) -> int:
        return self._tops[-1]

    def insert(self, at: int, items: Sequence[Item]) -> None:
        slots = [Slot(next(self._serials), item) for item in items]
        for slot in slots:
            slot.update(self.width)
        self.slots[at:at] = slots
        self._sum()

    def remove(self, kept: Callable[[Item], bool]) -> None:
        self.slots = [slot for slot in self.slots if kept(slot.item)]
        self._sum()

    def update(self, item: Item) -> int:
        """Take the blocks of `item` as they are now; returns the first line that has changed."""
        at = next(at for at in range(len(self.slots) - 1, -1, -1) if self.slots[at].item is item)
        changed = self._tops[at] + self.slots[at].update(self.width)
        self._sum()
        return changed

    def reset(self, width: int) -> None:
        """Forget all heights."""
        self.width = width
        for slot in self.slots:
            slot.reset(width)
        self._sum()

    def locate(self, y: int) -> Place | None:
        """The row at line `y`; None below the last one."""
        if not 0 <= y < self.height:
            return None
        at = bisect_right(self._tops, y) - 1
        y -= self._tops[at]
        tops = self.slots[at].tops
        block = bisect_right(tops, y) - 1
        return Place(at, block, y - tops[block])

    def top(self, slot: int, block: int = 0) -> int:
        """The first line of a block."""
        return self._tops[slot] + self.slots[slot].tops[block]

    def measure(self, start: int, end: int, measure: Measure) -> int | None:
        """Make the heights of all blocks between the lines `start` and `end` exact.

        Returns by how many rows what is above the block at their middle has grown; None where all were exact.
        """
        middle, grown, has_changed = (start + end) // 2, 0, False
        for at, index, top in list(self._list_blocks(start, end)):
            slot = self.slots[at]
            if slot.is_exact[index]:
                continue
            has_changed = True
            height = measure(slot.item, slot.blocks[index])
            grown += height - slot.heights[index] if top < middle else 0
            slot.heights[index], slot.is_exact[index] = height, True
            slot.tops = [0, *accumulate(slot.heights)]
        if not has_changed:
            return None
        self._sum()
        return grown

    def _list_blocks(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Slot, index and top of the blocks that lie in part between two lines."""
        for at in range(max(0, bisect_right(self._tops, start) - 1), len(self.slots)):
            for index, top in enumerate(self.slots[at].tops[:-1], 0):
                top += self._tops[at]
                if top >= end:
                    return
                if top + self.slots[at].heights[index] > start:
                    yield at, index, top

    def _sum(self) -> None:
        self._tops = [0, *accumulate(slot.tops[-1] for slot in self.slots)]
