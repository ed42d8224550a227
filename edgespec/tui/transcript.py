"""The conversation as a list of widgets, the newest at the bottom."""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import VerticalScroll
from textual.widget import Widget

from edgespec.conversations import Turn
from edgespec.tui.footer import format_footer
from edgespec.tui.turns import Answer, Notice, UserMessage

_MAX_TURNS = 40  # of a stored conversation that are drawn
_MAX_FORMATTED = 8_000  # characters of stored answers, counted from the end: many Markdown blocks take seconds


class Transcript(VerticalScroll):
    """Scrolls to its end as it grows, until the user scrolls up."""

    def __init__(self) -> None:
        super().__init__(id="transcript")

    def on_mount(self) -> None:
        self.anchor()

    async def add(self, widget: Widget) -> None:
        await self.mount(widget)

    async def show(self, turns: Sequence[Turn]) -> None:
        """Replace the content by the last of these turns."""
        await self.clear()
        widgets: list[Widget] = []
        if len(turns) > _MAX_TURNS:
            text = f"Only the last {_MAX_TURNS} of {len(turns)} messages are shown; /export FILE.md writes all of them."
            widgets.append(Notice(text))
        number = sum(turn.role == "user" for turn in turns[:-_MAX_TURNS])
        answers: list[tuple[Answer, Turn]] = []
        for turn in turns[-_MAX_TURNS:]:
            if turn.role == "user":
                number += 1
                widgets.append(UserMessage(turn.text, number))
                continue
            answer = Answer()
            answers.append((answer, turn))
            widgets.append(answer)
        with self.app.batch_update():
            await self.mount_all(widgets)
            characters = sum(len(turn.text) for _, turn in answers)  # from here to the end
            for answer, turn in answers:
                footer = format_footer(turn.metrics) if turn.finished else "cut off when the program ended"
                is_formatted = characters <= _MAX_FORMATTED
                await answer.show(turn.text, turn.reasoning, turn.spans, footer, is_formatted=is_formatted)
                characters -= len(turn.text)
        self.anchor()

    async def cut(self, number: int, *, keep_question: bool = False) -> None:
        """Remove question `number` and everything after it; everything where that question is not shown."""
        widgets = list(self.children)
        at = [i for i, widget in enumerate(widgets) if isinstance(widget, UserMessage) and widget.number == number]
        await self.remove_children(widgets[at[0] + keep_question if at else 0 :])

    async def clear(self, keep: Widget | None = None) -> None:
        """Remove every widget but `keep`."""
        await self.remove_children([child for child in self.children if child is not keep])

    def find(self, text: str) -> bool:
        """Scroll to the last widget that contains `text`, ignoring case; whether there is one."""
        for widget in reversed(self.children):
            if text.casefold() in getattr(widget, "text", "").casefold():
                self.scroll_to_widget(widget, top=True, animate=False)
                self.release_anchor()
                return True
        return False
