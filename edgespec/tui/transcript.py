"""The conversation as widgets, the newest below."""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import VerticalScroll
from textual.widget import Widget

from edgespec.conversations import Turn
from edgespec.tui.footer import format_footer
from edgespec.tui.turns import Answer, Notice, UserMessage

_SHOWN = 40  # turns of a conversation from before that are drawn
_FORMATTED = 8_000  # characters of their answers, from the end: Markdown of many blocks takes seconds


class Log(VerticalScroll):
    """Follows its end until the user scrolls up."""

    def __init__(self) -> None:
        super().__init__(id="log")

    def on_mount(self) -> None:
        self.anchor()

    async def add(self, widget: Widget) -> None:
        await self.mount(widget)

    async def show(self, turns: Sequence[Turn]) -> None:
        """Draw these turns in place of what is there, the last ones only if they are many."""
        await self.clear()
        widgets: list[Widget] = []
        if len(turns) > _SHOWN:
            told = f"The last {_SHOWN} of {len(turns)} messages; /export FILE.md writes all of them."
            widgets.append(Notice(told))
        number = sum(turn.role == "user" for turn in turns[:-_SHOWN])
        answers: list[tuple[Answer, Turn]] = []
        for turn in turns[-_SHOWN:]:
            if turn.role == "user":
                number += 1
                widgets.append(UserMessage(turn.text, number))
                continue
            answer = Answer(str(turn.settings.get("draft", "the draft model")))
            answers.append((answer, turn))
            widgets.append(answer)
        with self.app.batch_update():
            await self.mount_all(widgets)
            rest = sum(len(turn.text) for _, turn in answers)
            for answer, turn in answers:
                below = format_footer(turn.metrics) if turn.finished else "cut off when the program ended"
                await answer.show(turn.text, turn.reasoning, turn.spans, below, is_formatted=rest <= _FORMATTED)
                rest -= len(turn.text)
        self.anchor()

    async def cut(self, number: int, *, keep_question: bool = False) -> None:
        """Take question `number` and all that follows away; if it has been cleared, all that is left is later."""
        widgets = list(self.children)
        shown = [i for i, widget in enumerate(widgets) if isinstance(widget, UserMessage) and widget.number == number]
        await self.remove_children(widgets[shown[0] + keep_question if shown else 0 :])

    async def clear(self, besides: Widget | None = None) -> None:
        await self.remove_children([child for child in self.children if child is not besides])

    def find(self, text: str) -> bool:
        """Scroll to the last place that has `text`; whether there is one."""
        for widget in reversed(self.children):
            if text.casefold() in getattr(widget, "text", "").casefold():
                self.scroll_to_widget(widget, top=True, animate=False)
                self.release_anchor()
                return True
        return False
