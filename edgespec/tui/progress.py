"""What is being done: a download, a load, a prefill, or an answer that has no text yet."""

from __future__ import annotations

from itertools import count
from time import perf_counter

from textual.content import Content
from textual.widgets import Static

from edgespec.tui.activity import Activity
from edgespec.tui.bars import draw_bar

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Progress(Static):
    """One line; hidden while there is nothing to show."""

    def __init__(self) -> None:
        super().__init__("", id="progress", markup=False)
        self._beats = count()
        self.display = False

    def show(self, text: str | None, fraction: float | None = None) -> None:
        """`fraction` is between 0 and 1; None without a bar. None as the text hides the line."""
        self.display = text is not None
        if text is not None:
            bar = "" if fraction is None else f"  {draw_bar(fraction, 20)} {fraction:.0%}"
            spinner = _SPINNER[next(self._beats) % len(_SPINNER)]
            self.update(Content.assemble((f"{spinner} {text}{bar}", "$text-accent"), "   Esc stops"))

    def show_answer(self, activity: Activity) -> None:
        """Say what an answer waits for, and for how long: to be called several times a second."""
        if activity.answer is not None:
            self.show(*describe_wait(activity, perf_counter() - activity.stats.requested_s))


def describe_wait(activity: Activity, elapsed_s: float) -> tuple[str | None, float | None]:
    """Text and fraction of the line; no text while the answer itself grows."""
    answer, stats = activity.answer, activity.stats
    if answer is None or answer.text:
        return None, None
    if answer.reasoning:
        return f"reasoning · {stats.tokens:,} tokens · {elapsed_s:.0f} s", None
    text, fraction = stats.prefill_status
    if text is not None and fraction < 1:
        return f"{text} · {elapsed_s:.0f} s", fraction
    return f"waiting for the first token · {elapsed_s:.0f} s", None
