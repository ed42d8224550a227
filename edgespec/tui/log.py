"""The conversation as widgets, the newest below."""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import VerticalScroll
from textual.widget import Widget

from edgespec.conversations import Turn
from edgespec.tui.foot import foot
from edgespec.tui.turns import Answer, Notice, Said

_SHOWN = 100  # turns of a conversation from before that are drawn


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
        if len(turns) > _SHOWN:
            await self.add(Notice(f"The last {_SHOWN} of {len(turns)} messages; /export FILE.md writes all of them."))
        number = sum(turn.role == "user" for turn in turns[:-_SHOWN])
        for turn in turns[-_SHOWN:]:
            if turn.role == "user":
                number += 1
                await self.add(Said(turn.text, number))
                continue
            answer = Answer(str(turn.settings.get("draft", "the draft model")))
            await self.add(answer)
            below = foot(turn.metrics) if turn.finished else "cut off when the program ended"
            await answer.show(turn.text, turn.reasoning, turn.spans, below)
        self.anchor()

    async def cut(self, number: int, *, keep_question: bool = False) -> None:
        """Take question `number` and all that follows away."""
        widgets = list(self.children)
        first = next((i for i, w in enumerate(widgets) if isinstance(w, Said) and w.number == number), len(widgets))
        await self.remove_children(widgets[first + keep_question :])

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
