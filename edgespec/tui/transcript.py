"""The conversation, the newest at the bottom: a list of items of which only what is near the window is laid out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.cache import LRUCache
from textual.events import Click, Resize
from textual.geometry import Offset, Region, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from edgespec.conversations import Turn
from edgespec.tui.blocks import MAX_COLUMNS, Block, Row
from edgespec.tui.messages import BranchClicked
from edgespec.tui.panel import format_footer
from edgespec.tui.settings import Origins
from edgespec.tui.turns import Answer, Arrows, Fold, Item, UserMessage

# Which block of which item is at which line, where only the blocks near the window have been laid out.


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


_MARGIN = 1  # columns at each side
_MAX_CACHED_BLOCKS = 400
_MAX_BLOCKS = 2**20  # of an item, to tell its lines apart from those of others
_MAX_ROWS = 2**20  # of a block


class _Drawn(NamedTuple):
    rows: list[Row]
    strips: list[Strip]


class Transcript(ScrollView):
    """Scrolls to its end as it grows, until the user scrolls up.

    A line in a selection is identified by its item, block and row, since what is above it may still change its height.
    """

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self._layout = Layout()
        self._drawn: LRUCache[tuple[Block, Origins | None, int], _Drawn] = LRUCache(_MAX_CACHED_BLOCKS)
        self._styles: dict[tuple[str, ...], RichStyle] = {}
        self._is_following = True
        self._is_settling = False

    @property
    def items(self) -> list[Item]:
        return [slot.item for slot in self._layout.slots]

    @property
    def answers(self) -> list[Answer]:
        return [item for item in self.items if isinstance(item, Answer)]

    # The conversation.

    def add(self, item: Item) -> None:
        """Show `item` at the end."""
        self._layout.insert(len(self._layout.slots), [item])
        self._settle()

    def show(self, turns: Sequence[Turn]) -> None:
        """Replace the content by these turns."""
        items: list[Item] = []
        for turn in turns:
            if turn.role == "user":
                items.append(UserMessage(turn.text, 1 + sum(isinstance(each, UserMessage) for each in items)))
                continue
            answer = Answer(is_raw=bool(turn.settings.get("is_raw")))
            footer = format_footer(turn.metrics) if turn.finished else "cut off when the program ended"
            answer.show(turn.text, turn.reasoning, turn.spans, footer)
            items.append(answer)
        self._layout.remove(lambda item: False)
        self._layout.insert(0, items)
        self.follow()

    def update(self, item: Item) -> None:
        """Show what has changed in `item`."""
        self._settle(self._layout.update(item))

    def set_view(self, *, is_folded: bool, shows_origins: bool) -> None:
        """Fold the reasoning and show the origins of every answer."""
        for answer in self.answers:
            answer.is_folded, answer.shows_origins = is_folded, shows_origins
        self._reset()

    def cut(self, number: int, *, keep_question: bool = False) -> None:
        """Remove question `number` and everything after it; everything where that question is not shown."""
        items = self.items
        at = [i for i, item in enumerate(items) if isinstance(item, UserMessage) and item.number == number]
        kept = items[: at[0] + keep_question] if at else []
        self._layout.remove(lambda item: any(item is each for each in kept))
        self._settle()

    def drop(self, item: Item) -> None:
        self._layout.remove(lambda each: each is not item)
        self._settle()

    def clear(self, keep: Item | None = None) -> None:
        """Remove every item but `keep`."""
        self._layout.remove(lambda item: item is keep)
        self._settle()

    def find(self, text: str) -> bool:
        """Scroll to the last block that contains `text`, ignoring case; whether there is one."""
        for at in range(len(self._layout.slots) - 1, -1, -1):
            slot = self._layout.slots[at]
            position = slot.item.text.casefold().rfind(text.casefold())
            if position >= 0:
                blocks = [i for i, block in enumerate(slot.blocks) if block.start <= position < block.end]
                self._is_following = False
                self._reveal(at, blocks[-1] if blocks else 0)
                return True
        return False

    def follow(self) -> None:
        """Scroll to the end, and stay there as the content grows."""
        self._is_following = True
        self._settle()

    # Lines.

    @property
    def _width(self) -> int:
        """Columns of a block."""
        return max(1, self.size.width - 2 * _MARGIN)

    def _settle(self, changed: int = 0) -> None:
        """Lay out what is in the window or near it, and leave the window where it is in the text.

        `changed` is the first line that may have changed.
        """
        if self._is_settling or not self.size.height:
            return
        if self._layout.width != self._width:
            self._reset()
            return
        self._is_settling = True
        height, y = self.size.height, self.scroll_offset.y
        while True:
            if self._is_following:
                y = self._layout.height - height
            grown = self._layout.measure(y - height, y + height, self._measure)
            if grown is None:
                break
            y += grown
        self._resize()
        if max(0, y) != self.scroll_offset.y:
            self.scroll_to(y=max(0, y), animate=False)
        else:
            top = max(0, changed - max(0, y))
            self.refresh(Region(0, top, self.size.width, max(0, height - top)))
        self._is_settling = False

    def _resize(self) -> None:
        """Tell the scrollbar the height of the content. Nothing else on the screen depends on it."""
        self.set_reactive(ScrollView.virtual_size, Size(self.size.width, self._layout.height))
        self.vertical_scrollbar.window_virtual_size = self._layout.height

    def _reveal(self, slot: int, block: int) -> None:
        """Scroll so that a block is the first one of the window."""
        for _ in range(3):  # what is measured on the way moves it
            self._resize()
            self.scroll_to(y=self._layout.top(slot, block), animate=False)

    def _reset(self) -> None:
        """Lay out everything anew; the first block of the window stays the first."""
        place = self._layout.locate(self.scroll_offset.y)
        self._layout.reset(self._width)
        if place is not None and not self._is_following:
            slot = self._layout.slots[place.slot]
            self._reveal(place.slot, min(place.block, len(slot.blocks) - 1))
        self._settle()

    def _measure(self, item: Item, block: Block) -> int:
        return len(self._draw(item, block).rows)

    def _draw(self, item: Item, block: Block) -> _Drawn:
        origins = item.origins(block)
        key = (block, origins, self._width)
        if (drawn := self._drawn.get(key)) is None:
            rows = block.lay_out(self._width, origins.paint() if origins else list)
            drawn = self._drawn[key] = _Drawn(rows, [self._make_strip(row) for row in rows])
        return drawn

    def _make_strip(self, row: Row) -> Strip:
        margin = Segment(" " * _MARGIN, self._select_style(()))
        segments = [Segment(text, self._select_style((row.fill, *styles))) for text, styles in row.runs if text]
        used = sum(cell_len(segment.text) for segment in segments)
        filled = Segment(" " * max(0, min(self._width, MAX_COLUMNS) - used), self._select_style((row.fill,)))
        strip = Strip([margin, *segments, filled]).simplify()
        return strip.adjust_cell_length(self.size.width, self._select_style(()))

    def _select_style(self, styles: tuple[str, ...]) -> RichStyle:
        if styles not in self._styles:
            style = self.visual_style
            for each in styles:
                style += self.app.stylesheet.parse_style(each)
            self._styles[styles] = style.rich_style
        return self._styles[styles]

    def render_line(self, y: int) -> Strip:
        place = self._layout.locate(self.scroll_offset.y + y)
        blank = Strip.blank(self.size.width, self._select_style(()))
        if place is None:
            return blank
        slot = self._layout.slots[place.slot]
        strips = self._draw(slot.item, slot.blocks[place.block]).strips
        if place.row >= len(strips):
            return blank
        line = self._identify(place)
        return self._mark_selected(strips[place.row], line).apply_offsets(0, line)

    # Events.

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._is_settling:
            self._is_following = new_value >= self.max_scroll_y
            self._settle()

    def on_resize(self, event: Resize) -> None:
        self._settle()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._drawn.clear()
        self._styles.clear()

    def on_click(self, event: Click) -> None:
        place = self._layout.locate(self.scroll_offset.y + event.y)
        if place is None:
            return
        slot = self._layout.slots[place.slot]
        if isinstance(slot.blocks[place.block], Fold) and isinstance(slot.item, Answer):
            slot.item.is_folded = not slot.item.is_folded
            self.update(slot.item)
        elif isinstance(slot.blocks[place.block], Arrows):
            row = self._draw(slot.item, slot.blocks[place.block]).rows[0].text
            if event.x - _MARGIN <= row.index("›"):  # noqa: RUF001
                self.post_message(BranchClicked(slot.item, 1 if event.x - _MARGIN > row.index("/") else -1))

    # Selection.

    @property
    def allow_select(self) -> bool:
        return True

    def _identify(self, place: Place) -> int:
        """A number for a line, which grows from top to bottom."""
        return (self._layout.slots[place.slot].serial * _MAX_BLOCKS + place.block) * _MAX_ROWS + place.row

    def _mark_selected(self, strip: Strip, line: int) -> Strip:
        selection = self.text_selection
        span = selection.get_span(line) if selection else None
        if span is None:
            return strip
        start = cell_len(strip.text[: span[0]])
        end = strip.cell_length if span[1] < 0 else cell_len(strip.text[: span[1]])
        style = self.screen.get_component_rich_style("screen--selection")
        return Strip.join([strip.crop(0, start), strip.crop(start, end).apply_style(style), strip.crop(end)])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text: lines that were broken to fit are one line again, and margins are left out."""
        parts: list[str] = []
        for line, row in self._list_rows(selection.start, selection.end):
            if (span := selection.get_span(line)) is None:
                continue
            text = " " * _MARGIN + row.text
            end = None if span[1] < 0 else span[1]
            parts += [text[max(span[0], row.skip + _MARGIN) : end].rstrip(), row.joint]
        return "".join(parts[:-1]), "\n"

    def _list_rows(self, start: Offset | None, end: Offset | None) -> Iterator[tuple[int, Row]]:
        """Lines and rows of the blocks from one line to another."""
        for at, slot in enumerate(self._layout.slots):
            for index, block in enumerate(slot.blocks):
                line = self._identify(Place(at, index, 0))
                if (start is not None and line + _MAX_ROWS <= start.y) or (end is not None and line > end.y):
                    continue
                for number, row in enumerate(self._draw(slot.item, block).rows):
                    yield line + number, row
