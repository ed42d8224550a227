"""The conversation on the screen: messages, notices and answers that grow, as blocks in a list that scrolls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from rich.cells import cell_len
from rich.segment import Segment
from textual.cache import LRUCache
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from edgespec.answers.summary import summarize
from edgespec.chat import Turn
from edgespec.chat.code import is_python
from edgespec.chat.tui.blocks import (
    MAX_COLUMNS,
    MUTED,
    Block,
    CodeBlock,
    Document,
    Parse,
    Row,
    Run,
    paint,
    parse_plain,
    parse_python,
    parse_thoughts,
)
from edgespec.chat.tui.markdown import parse_markdown
from edgespec.chat.tui.prompt import sanitize
from edgespec.drafters.registry import drafter_specs
from edgespec.text.stream import Piece

_JUDGED = 2_000  # characters of a raw text that tell whether it is code
_USER_FILL = "on $boost"
_EDGE = "    ▌ "  # in front of the rows of a user's message


class Item:
    """What a transcript shows. A message can show which of the branches at its place it is."""

    text: str
    _block: Block
    _arrows: tuple[Run, ...] = ()

    @property
    def blocks(self) -> list[Block]:
        return [self._block]

    def origins(self, block: Block) -> tuple[Run, ...]:
        """The source of a block in the colors of who proposed it; empty if they are not shown."""
        return ()

    def mark(self, label: str, *, is_selected: bool) -> None:
        """Show `label` below the message; nothing if it is empty."""
        style = "$text-accent bold" if is_selected else MUTED
        self._arrows = ((f"{label}  ", style),) if label else ()


class UserMessage(Item):
    """A message of the user, as typed, with its number."""

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        first, runs = f"{_EDGE}{number} ", ((sanitize(text), ""),)
        self._block = Block(0, len(text), first, _EDGE, "", "$text-primary", runs, _USER_FILL)

    @property
    def blocks(self) -> list[Block]:
        arrows = Block(0, 0, _EDGE, _EDGE, None, "$text-primary", self._arrows, _USER_FILL, "arrows")
        return [self._block, arrows] if self._arrows else [self._block]


class Notice(Item):
    """A message of the program; `kind` is "note" or "error"."""

    def __init__(self, text: str, kind: str = "note") -> None:
        self.text = text
        self.kind = kind
        prefix, style = ("▌ ", "$text-error") if kind == "error" else ("", MUTED)
        self._block = Block(0, len(text), prefix, prefix, "", style, ((sanitize(text), style),))


class Answer(Item):
    """Reasoning in a fold, the answer as Markdown or raw, and a footer."""

    def __init__(self, *, is_raw: bool = False) -> None:
        """`is_raw`: the text is not Markdown but the output of a model without a chat template."""
        self.text = ""
        self.reasoning = ""
        self.spans: list[Span] = []
        self.footer = ""
        self.is_folded = True
        self.shows_origins = False
        self._is_raw = is_raw
        self._shown = ""  # the text without control characters
        self._ends: list[int] = []  # of the spans, in what is shown
        self._thoughts = Document(parse_thoughts)
        self._parse: Parse = parse_plain if is_raw else parse_markdown
        self._document = Document(self._parse)

    @property
    def blocks(self) -> list[Block]:
        blocks: list[Block] = []
        if self.reasoning:
            blocks.append(_make_block("fold", "", ((f"{'▶' if self.is_folded else '▼'} Reasoning", MUTED),)))
            blocks += () if self.is_folded else self._thoughts.blocks
        blocks += self._document.blocks
        if self.shows_origins and self.spans:
            blocks.append(Block(runs=describe_origins(self.spans)))
        if self.footer or self._arrows:
            gap = "" if blocks and isinstance(blocks[-1], CodeBlock) else None
            blocks.append(_make_block("arrows", gap, (*self._arrows, (self.footer, MUTED))))
        return blocks

    def origins(self, block: Block) -> tuple[Run, ...]:
        runs: list[Run] = []
        if not self.shows_origins or block.role:
            return ()
        at = block.start
        for i in range(bisect_right(self._ends, at), len(self._ends)):
            if at >= block.end:
                break
            _, origin, tokens = self.spans[i]
            runs.append((self._shown[at : min(self._ends[i], block.end)], select_style(origin, tokens)))
            at = self._ends[i]
        return tuple(runs)

    def append(self, pieces: Sequence[Piece]) -> None:
        if reasoning := "".join(piece.text for piece in pieces if piece.channel == "reasoning"):
            self._think(reasoning)
        if answer := [piece for piece in pieces if piece.channel != "reasoning"]:
            spans = [(len(piece.text), piece.drafter, 1) for piece in answer]
            self._grow("".join(piece.text for piece in answer), spans)

    def show(self, text: str, reasoning: str, spans: Sequence[Any], footer: str) -> None:
        """Become a stored answer; spans that are none are left out."""
        self.footer = footer
        self._think(reasoning)
        self._grow(text, [span for span in spans if list(map(type, span)) == [int, str, int]])

    def _think(self, text: str) -> None:
        self.reasoning += sanitize(text)
        self._thoughts.update(self.reasoning)

    def _grow(self, text: str, spans: Sequence[Span]) -> None:
        """Append a text with its spans; neighbors of the same origin are merged."""
        at, end = 0, len(self._shown)
        if end > (self._ends[-1] if self._ends else 0):  # an imported answer may have no spans for its end
            self.spans.append((len(self.text) - sum(span[0] for span in self.spans), "", 1))
            self._ends.append(end)
        for length, origin, tokens in spans:
            end += len(sanitize(text[at : at + length]))  # a character may be shown by several
            at += length
            if self.spans and self.spans[-1][1] == origin:
                self._ends.pop()
                before, _, earlier = self.spans.pop()
                length, tokens = length + before, tokens + earlier
            self.spans.append((length, origin, tokens))
            self._ends.append(end)
        self.text += text
        self._shown += sanitize(text)
        if self._is_raw:
            parse = parse_python if is_python(self.text[:_JUDGED]) else parse_plain
            if parse is not self._parse:
                self._parse, self._document = parse, Document(parse)
        if self._shown:
            self._document.update(self._shown)


@lru_cache(1024)  # a block knows its height, which every frame asks for
def _make_block(role: Literal["fold", "arrows"], gap: str | None, runs: tuple[Run, ...]) -> Block:
    return Block(gap=gap, runs=runs, role=role)


Span = tuple[int, str, int]
"""(characters, origin as in Piece, tokens) of a run of tokens with one origin."""

# Of the registry's drafters, in its order. Underline and weight carry the same without color.
_COLORS = ("$text-primary", "$text-success", "$text-error", "$text-secondary", "$text-accent")
_SEVERAL = "$text-warning"  # drafters that proposed the same token
_MIN_LONG_RUN = 4  # tokens


def describe_origins(spans: Sequence[Span]) -> tuple[Run, ...]:
    runs: list[Run] = [("plain: the model   ", MUTED)]
    for origin in sorted({origin for _, origin, _ in spans if origin}):
        runs += [(origin.replace("+", " and "), select_style(origin, 1)), ("   ", "")]
    return (*runs, ("bold: long runs", MUTED))


def select_style(origin: str, tokens: int) -> str:
    if not origin or origin == "structure":
        return ""
    names = list(drafter_specs())
    color = _SEVERAL if "+" in origin else "$text"
    if origin in names:
        color = _COLORS[names.index(origin) % len(_COLORS)]
    return f"{color} {'bold ' if tokens >= _MIN_LONG_RUN else ''}underline"


_MAX_CACHED_BLOCKS = 400
Place = tuple[Item, Block]
"""A block of the transcript, and the item that it is a part of."""


class Transcript(ScrollView):
    """A list, with the newest item at the bottom. It scrolls to its end as it grows, until the user scrolls up.

    The heights of all blocks are known; their lines are drawn when they come into the window.
    """

    @dataclass(eq=False)
    class BranchClicked(Message):
        """The user clicked on the arrows of a message; `by` is -1 or 1."""

        item: Item
        by: int

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self.items: list[Item] = []
        self._places: list[Place] = []
        self._tops = [0]  # the first line of each place, and the number of lines
        self._width = 0  # at which they are laid out
        self._is_laid_out = False  # whether `items` are
        self._drawn: LRUCache[tuple[Block, tuple[Run, ...], int], list[tuple[Row, Strip]]]
        self._drawn = LRUCache(_MAX_CACHED_BLOCKS)
        self._is_following = True

    @property
    def answers(self) -> list[Answer]:
        return [item for item in self.items if isinstance(item, Answer)]

    # The conversation.

    def add(self, item: Item) -> None:
        self._replace([*self.items, item])

    def drop(self, items: Sequence[Item]) -> None:
        """Take these from the list; those that are not in it do not matter."""
        self._replace([item for item in self.items if item not in items])

    def show(self, turns: Sequence[Turn]) -> None:
        items: list[Item] = []
        for turn in turns:
            if turn.role == "user":
                items.append(UserMessage(turn.text, 1 + sum(isinstance(each, UserMessage) for each in items)))
                continue
            answer = Answer(is_raw=bool(turn.settings.get("is_raw")))
            footer = summarize(turn.metrics) if turn.finished else "cut off when the program ended"
            answer.show(turn.text, turn.reasoning, turn.spans, footer)
            items.append(answer)
        self._is_following = True
        self._replace(items)

    def set_view(self, *, is_folded: bool, shows_origins: bool) -> None:
        place = self._first_place
        for answer in self.answers:
            answer.is_folded, answer.shows_origins = is_folded, shows_origins
        self.update()
        self._reveal(place)
        self.refresh()

    def cut(self, number: int, *, keep_question: bool = False) -> None:
        """Remove question `number` and everything after it; everything if that question is not shown."""
        at = [i for i, item in enumerate(self.items) if isinstance(item, UserMessage) and item.number == number]
        self._replace(self.items[: at[0] + keep_question] if at else [])

    def clear(self, keep: Item | None = None) -> None:
        self._replace([item for item in self.items if item is keep])

    def follow(self) -> None:
        """Scroll to the end, and stay there as the content grows."""
        self._is_following = True
        self.update()

    # Lines.

    @property
    def _first_place(self) -> Place | None:
        """The first place in the window, if it is to stay there; None if the end is followed."""
        y = self.scroll_offset.y
        return None if self._is_following or y >= self._tops[-1] else self._find_line(y)[0]

    def _find_line(self, y: int) -> tuple[Place, int]:
        """The place that line `y` belongs to, and the number of the line in its block."""
        number = bisect_right(self._tops, y) - 1
        return self._places[number], y - self._tops[number]

    def _replace(self, items: list[Item]) -> None:
        self.items = items
        self.update()

    def update(self, since: Item | None = None) -> None:
        """Lay out the items, or only `since` and those after it, as they are now, and draw what has changed."""
        width = self.scrollable_content_region.width
        if width <= 0 or not self.size.height:
            self._is_laid_out = False  # it is when it has a size
            return
        if width != self._width:
            self._width, self._places, self._tops = width, [], [0]
        first = next((i for i, (item, _) in enumerate(self._places) if item is since), 0)
        at = self.items.index(since) if first and self._is_laid_out and since in self.items else 0
        first, self._is_laid_out = first if at else 0, True
        before, after = self._places[first:], [(item, block) for item in self.items[at:] for block in item.blocks]
        pairs = enumerate(zip(before, after, strict=False), first)
        changed = next((i for i, (old, new) in pairs if old != new), first + min(len(before), len(after)))
        self._places[first:] = after
        del self._tops[changed + 1 :]
        for _, block in self._places[changed:]:
            self._tops.append(self._tops[-1] + block.height(width))
        n = self._tops[-1]
        # Nothing else on the screen depends on the height of the content: no new layout of it.
        self.set_reactive(ScrollView.virtual_size, Size(width, n))
        self.vertical_scrollbar.window_virtual_size = n
        y = self.max_scroll_y if self._is_following else min(self.scroll_offset.y, self.max_scroll_y)
        if y != self.scroll_offset.y:
            self.scroll_to(y=y, animate=False)
        else:
            top = max(0, self._tops[changed] - y)
            self.refresh(Region(0, top, self.outer_size.width, max(0, self.size.height - top)))

    def _reveal(self, place: Place | None) -> None:
        """Scroll so that `place`, if it is still there, is the first one of the window."""
        if place in self._places:
            self._is_following = False
            self.scroll_to(y=self._tops[self._places.index(place)], animate=False)

    def _draw(self, item: Item, block: Block) -> list[tuple[Row, Strip]]:
        origins = item.origins(block)
        key = (block, origins, self._width)
        if (drawn := self._drawn.get(key)) is None:
            content = paint(block.content, origins) if origins else block.content
            rows = block.lay_out(self._width, content)
            drawn = self._drawn[key] = [(row, self._make_strip(row)) for row in rows]
        return drawn

    def _make_strip(self, row: Row) -> Strip:
        style, content = self.visual_style, row.content
        if row.fill:
            missing = min(self._width, MAX_COLUMNS) - content.cell_length
            content = content.pad_right(max(0, missing)).stylize_before(row.fill)
        runs = content.render(style, end="", parse_style=self.app.stylesheet.parse_style)
        strip = Strip([Segment(text, each.rich_style) for text, each in runs])
        return strip.adjust_cell_length(self._width, style.rich_style)

    def render_line(self, y: int) -> Strip:
        line = self.scroll_offset.y + y
        if line >= self._tops[-1]:
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        place, row = self._find_line(line)
        return self._mark_selected(self._draw(*place)[row][1], line).apply_offsets(0, line)

    # Events.

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._is_following = new_value >= self.max_scroll_y

    def on_resize(self, event: Resize) -> None:
        place = self._first_place
        self.update()
        self._reveal(place)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._drawn.clear()

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or self.scroll_offset.y + offset.y >= self._tops[-1]:
            return
        (item, block), _ = self._find_line(self.scroll_offset.y + offset.y)
        text = block.first + block.content.plain
        if block.role == "fold" and isinstance(item, Answer):
            item.is_folded = not item.is_folded
            self.update()
        elif block.role == "arrows" and offset.x <= text.find("›"):  # noqa: RUF001
            self.post_message(self.BranchClicked(item, 1 if offset.x > text.index("/") else -1))

    # Selection.

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
        last = selection.end.y + 1 if selection.end else self._tops[-1]
        for y in range(first, min(last, self._tops[-1])):
            place, number = self._find_line(y)
            row = self._draw(*place)[number][0]
            start, end = selection.get_span(y) or (0, 0)
            text = row.content.plain[max(start, row.skip) : None if end < 0 else end]
            parts.append(f"{text.rstrip()}\n" if row.is_end else text)
        return "".join(parts).removesuffix("\n"), "\n"
