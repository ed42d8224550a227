"""The conversation on the screen: messages, notices and answers that grow, as blocks in a list that scrolls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.cache import LRUCache
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from edgespec.conversations import Turn
from edgespec.text.stream import Piece
from edgespec.tui.blocks import (
    MAX_COLUMNS,
    MUTED,
    Block,
    CodeBlock,
    Document,
    Parse,
    Row,
    Run,
    TextBlock,
    is_python,
    parse_code,
    parse_plain,
)
from edgespec.tui.markdown import parse_markdown
from edgespec.tui.panel import format_footer
from edgespec.tui.prompt import sanitize
from edgespec.tui.settings import Origins, Span, describe_origins, extend_spans

_JUDGED = 2_000  # characters of a raw text that tell whether it is code
_USER_FILL = "on $boost"
_EDGE = "    ▌ "  # in front of the rows of a user's message


class Item:
    """What a transcript shows. A message can tell which one it is of those in its place."""

    text: str
    _arrows: tuple[Run, ...] = ()

    @property
    def blocks(self) -> list[Block]:
        raise NotImplementedError

    def origins(self, block: Block) -> Origins | None:
        """The origins of a block's characters; None where they are not shown."""
        return None

    def mark(self, label: str, *, is_selected: bool) -> bool:
        """Show `label` below the message, nothing if it is empty; returns whether anything changes."""
        before, style = self._arrows, "$text-accent bold" if is_selected else MUTED
        self._arrows = ((f"{label}  ", (style,)),) if label else ()
        return self._arrows != before


class UserMessage(Item):
    """A message of the user, as typed, with its number."""

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        runs = ((sanitize(text), ()),)
        self._block = TextBlock(0, len(text), f"{_EDGE}{number} ", _EDGE, "", "$text-primary", runs, _USER_FILL)

    @property
    def blocks(self) -> list[Block]:
        arrows = Arrows(first=_EDGE, gap=None, edge="$text-primary", runs=self._arrows, fill=_USER_FILL)
        return [self._block, arrows] if self._arrows else [self._block]


class Notice(Item):
    """A message of the program; `kind` is "note" or "error"."""

    def __init__(self, text: str, kind: str = "note") -> None:
        self.text = text
        self.kind = kind
        prefix, style = ("▌ ", "$text-error") if kind == "error" else ("", MUTED)
        self._block = TextBlock(0, len(text), prefix, prefix, "", style, ((sanitize(text), (style,)),))

    @property
    def blocks(self) -> list[Block]:
        return [self._block]


class Fold(TextBlock):
    """The line that folds and unfolds what is below it."""


class Arrows(TextBlock):
    """The line that tells which branch a message is, at its start."""


class Thought(TextBlock):
    """A part of the reasoning."""


class Answer(Item):
    """Reasoning in a fold, the answer as Markdown or raw, and a footer."""

    def __init__(self, *, is_raw: bool = False) -> None:
        """`is_raw`: the text is no Markdown but what a model without a chat template has written."""
        self.text = ""
        self.reasoning = ""
        self.spans: list[Span] = []
        self.footer = ""
        self.is_folded = True
        self.shows_origins = False
        self._is_raw = is_raw
        self._is_code = False
        self._shown = ""  # the text without control characters
        self._ends: list[int] = []  # of the spans, in characters of `_shown`; empty until they are needed
        self._thoughts = Document(parse_plain("  ", MUTED, kind=Thought))
        self._document = Document(self._select_parser())

    @property
    def blocks(self) -> list[Block]:
        blocks: list[Block] = []
        if self.reasoning:
            blocks.append(Fold(runs=((f"{'▶' if self.is_folded else '▼'} Reasoning", (MUTED,)),)))
            blocks += () if self.is_folded else self._thoughts.blocks
        blocks += self._document.blocks
        if self.shows_origins and self.spans:
            blocks.append(TextBlock(runs=describe_origins(self.spans)))
        if self.footer or self._arrows:
            line = Arrows if self._arrows else TextBlock
            gap = "" if blocks and isinstance(blocks[-1], CodeBlock) else None
            blocks.append(line(gap=gap, runs=(*self._arrows, (self.footer, (MUTED,)))))
        return blocks

    def origins(self, block: Block) -> Origins | None:
        if not self.shows_origins or block.end <= block.start or isinstance(block, Thought):
            return None
        if not self._ends:
            self._ends = list(accumulate(length for length, _, _ in self.spans))
            if len(self._shown) > len(self.text):  # a character is shown by several
                self._ends = [len(sanitize(self.text[:end])) for end in self._ends]
        return Origins.of(self._shown, self.spans, self._ends, block.start, block.end)

    def append(self, pieces: Sequence[Piece]) -> None:
        """Add the next pieces of the answer and its reasoning."""
        if reasoning := "".join(piece.text for piece in pieces if piece.channel == "reasoning"):
            self._think(reasoning)
        if answer := [piece for piece in pieces if piece.channel != "reasoning"]:
            extend_spans(self.spans, answer)
            self._ends.clear()
            self._grow("".join(piece.text for piece in answer))

    def show(self, text: str, reasoning: str, spans: Any, footer: str) -> None:
        """Become a stored answer."""
        self.footer = footer
        self.spans = [tuple(span) for span in spans]
        self._think(reasoning)
        self._grow(text)

    def _think(self, text: str) -> None:
        self.reasoning += sanitize(text)
        self._thoughts.update(self.reasoning)

    def _grow(self, text: str) -> None:
        self.text += text
        self._shown += sanitize(text)
        is_code = self._is_raw and is_python(self.text[:_JUDGED])
        if is_code is not self._is_code:
            self._is_code = is_code
            self._document = Document(self._select_parser())
        if self._shown:
            self._document.update(self._shown)

    def _select_parser(self) -> Parse:
        if not self._is_raw:
            return parse_markdown
        return parse_code("python") if self._is_code else parse_plain()


# The list, with the newest item at the bottom. Only what is in the window is drawn.


_MARGIN = 1  # columns at each side
_MAX_CACHED_BLOCKS = 400


class Slot:
    """One item: its blocks, and in `tops` the line of the item where each begins, and where the last one ends."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.blocks: list[Block] = []
        self.tops: list[int] = [0]

    def update(self, width: int) -> int:
        """Take the item's blocks as they are now. Those that are as before keep their heights. Without a `width`, which
        is not known before the first layout, nothing has a height.

        Returns the top of the first block that is another one.
        """
        blocks = self.item.blocks
        n = 0
        for before, now in zip(self.blocks, blocks, strict=False):
            if before is not now and before != now:
                break
            n += 1
        self.blocks[n:] = blocks[n:]
        heights = [len(block.lay_out(width)) if width else 0 for block in blocks[n:]]
        self.tops[n:] = accumulate(heights, initial=self.tops[n])
        return self.tops[n]


@dataclass(frozen=True, slots=True)
class Place:
    """A row of a block, by the indices of its slot, of the block in the slot, and of the row in the block."""

    slot: int
    block: int
    row: int


class _Drawn(NamedTuple):
    rows: list[Row]
    strips: list[Strip]


class Transcript(ScrollView):
    """Scrolls to its end as it grows, until the user scrolls up.

    The heights of all blocks are known; they get styles where they come into the window.
    """

    @dataclass(eq=False)
    class BranchClicked(Message):
        """The user clicked on the arrows of a message; `by` is -1 or 1."""

        item: Item
        by: int

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self._slots: list[Slot] = []
        self._tops: list[int] = [0]  # of the slots, and at the end the height of all
        self._columns = 0  # of a block, as laid out; 0 before the first layout
        self._drawn: LRUCache[tuple[Block, Origins | None, int], _Drawn] = LRUCache(_MAX_CACHED_BLOCKS)
        self._styles: dict[tuple[str, ...], RichStyle] = {}
        self._is_following = True

    @property
    def items(self) -> list[Item]:
        return [slot.item for slot in self._slots]

    @property
    def answers(self) -> list[Answer]:
        return [item for item in self.items if isinstance(item, Answer)]

    # The conversation.

    def add(self, item: Item) -> None:
        """Show `item` at the end."""
        self._replace([*self.items, item])

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
        self._is_following = True
        self._replace(items)

    def update(self, item: Item) -> None:
        """Show what has changed in `item`."""
        at = next(at for at in range(len(self._slots) - 1, -1, -1) if self._slots[at].item is item)
        self._settle(self._tops[at] + self._slots[at].update(self._columns))

    def set_view(self, *, is_folded: bool, shows_origins: bool) -> None:
        """Fold the reasoning and show the origins of every answer."""
        for answer in self.answers:
            answer.is_folded, answer.shows_origins = is_folded, shows_origins
        self._lay_out_all()

    def cut(self, number: int, *, keep_question: bool = False) -> None:
        """Remove question `number` and everything after it; everything where that question is not shown."""
        items = self.items
        at = [i for i, item in enumerate(items) if isinstance(item, UserMessage) and item.number == number]
        self._replace(items[: at[0] + keep_question] if at else [])

    def drop(self, item: Item) -> None:
        self._replace([each for each in self.items if each is not item])

    def clear(self, keep: Item | None = None) -> None:
        """Remove every item but `keep`."""
        self._replace([item for item in self.items if item is keep])

    def find(self, text: str) -> bool:
        """Scroll to the last block that contains `text`, ignoring case; whether there is one."""
        for at in range(len(self._slots) - 1, -1, -1):
            slot = self._slots[at]
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

    def _replace(self, items: Sequence[Item]) -> None:
        """Show these items; those that are shown already keep their heights."""
        known = {id(slot.item): slot for slot in self._slots}
        self._slots = [known.get(id(item)) or self._lay_out(item) for item in items]
        self._settle()

    def _lay_out(self, item: Item) -> Slot:
        slot = Slot(item)
        slot.update(self._columns)
        return slot

    def _lay_out_all(self) -> None:
        """Lay out what has changed, and everything at another width; the first block of the window stays the first."""
        place = None if self._is_following else self._locate(self.scroll_offset.y)
        columns = max(1, self.size.width - 2 * _MARGIN)
        if columns != self._columns:
            self._columns, self._slots = columns, [Slot(item) for item in self.items]
        for slot in self._slots:
            slot.update(columns)
        self._settle()
        if place is not None:
            self._reveal(place.slot, min(place.block, len(self._slots[place.slot].blocks) - 1))

    def _settle(self, changed: int = 0) -> None:
        """Take the heights as they are now; `changed` is the first line that may have changed."""
        self._tops = [0, *accumulate(slot.tops[-1] for slot in self._slots)]
        if not self.size.height:
            return
        # Nothing else on the screen depends on the height of the content: no new layout of it.
        self.set_reactive(ScrollView.virtual_size, Size(self.size.width, self._tops[-1]))
        self.vertical_scrollbar.window_virtual_size = self._tops[-1]
        y = self.max_scroll_y if self._is_following else min(self.scroll_offset.y, self.max_scroll_y)
        if y != self.scroll_offset.y:
            self.scroll_to(y=y, animate=False)
        else:
            top = max(0, changed - y)
            self.refresh(Region(0, top, self.size.width, max(0, self.size.height - top)))

    def _locate(self, y: int) -> Place | None:
        """The row at line `y`; None below the last one."""
        if not 0 <= y < self._tops[-1]:
            return None
        slot = bisect_right(self._tops, y) - 1
        y -= self._tops[slot]
        tops = self._slots[slot].tops
        block = bisect_right(tops, y) - 1
        return Place(slot, block, y - tops[block])

    def _reveal(self, slot: int, block: int) -> None:
        """Scroll so that a block is the first one of the window."""
        self.scroll_to(y=self._tops[slot] + self._slots[slot].tops[block], animate=False)

    def _draw(self, item: Item, block: Block) -> _Drawn:
        origins = item.origins(block)
        key = (block, origins, self._columns)
        if (drawn := self._drawn.get(key)) is None:
            rows = block.lay_out(self._columns, origins.paint() if origins else list)
            drawn = self._drawn[key] = _Drawn(rows, [self._make_strip(row) for row in rows])
        return drawn

    def _make_strip(self, row: Row) -> Strip:
        margin = Segment(" " * _MARGIN, self._select_style(()))
        segments = [Segment(text, self._select_style((row.fill, *styles))) for text, styles in row.runs if text]
        used = sum(cell_len(segment.text) for segment in segments)
        filled = Segment(" " * max(0, min(self._columns, MAX_COLUMNS) - used), self._select_style((row.fill,)))
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
        line = self.scroll_offset.y + y
        place = self._locate(line)
        if place is None:
            return Strip.blank(self.size.width, self._select_style(()))
        slot = self._slots[place.slot]
        strip = self._draw(slot.item, slot.blocks[place.block]).strips[place.row]
        return self._mark_selected(strip, line).apply_offsets(0, line)

    # Events.

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._is_following = new_value >= self.max_scroll_y

    def on_resize(self, event: Resize) -> None:
        if event.size.height:
            self._lay_out_all()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._drawn.clear()
        self._styles.clear()

    def on_click(self, event: Click) -> None:
        place = self._locate(self.scroll_offset.y + event.y)
        if place is None:
            return
        slot = self._slots[place.slot]
        if isinstance(slot.blocks[place.block], Fold) and isinstance(slot.item, Answer):
            slot.item.is_folded = not slot.item.is_folded
            self.update(slot.item)
        elif isinstance(slot.blocks[place.block], Arrows):
            row = self._draw(slot.item, slot.blocks[place.block]).rows[0].text
            if event.x - _MARGIN <= row.index("›"):  # noqa: RUF001
                self.post_message(self.BranchClicked(slot.item, 1 if event.x - _MARGIN > row.index("/") else -1))

    # Selection.

    @property
    def allow_select(self) -> bool:
        return True

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
        first = selection.start.y if selection.start else 0
        last = min(selection.end.y + 1, self._tops[-1]) if selection.end else self._tops[-1]
        for line in range(first, last):
            span, place = selection.get_span(line), self._locate(line)
            if span is not None and place is not None:
                slot = self._slots[place.slot]
                row = self._draw(slot.item, slot.blocks[place.block]).rows[place.row]
                end = None if span[1] < 0 else span[1]
                text = " " * _MARGIN + row.text
                parts += [text[max(span[0], row.skip + _MARGIN) : end].rstrip(), row.joint]
        return "".join(parts[:-1]), "\n"
