"""The details of an answer: its rounds, costs and acceptance."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Static, TabbedContent, TabPane

from edgespec.autopilot.stats import DraftStats
from edgespec.chat.tui.panel import MAX_STEPS, draw_bar
from edgespec.core.metrics import Meter, Metrics
from edgespec.core.protocols import Step

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # of the forwards whose cost is shown
_MATCH_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_BAR_CELLS = 40
_INTERVAL_S = 0.5
_STEP_COLUMNS = (("step", 4), ("drafter", 11), ("accepted", 8), ("tokens", 7), ("ms", 13))
_STEP_WIDTH = sum(width + 2 for _, width in _STEP_COLUMNS) + 11  # with the padding of cells, a scrollbar, the frame
_MIN_REASON = 16


class Details(ModalScreen[None]):
    """Three tabs: steps, the newest first; cost by rows, why a part of the prompt was read again, and what was said
    while the model was loaded; acceptance by depth and by length of the n-gram match.

    The steps stand still while one other than the newest is selected.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f2,q", "dismiss", "Back")]

    def __init__(
        self,
        read: Callable[[], Meter],
        read_drafts: Callable[[], Awaitable[DraftStats | None]],
        notices: Sequence[str],
    ) -> None:
        """`read_drafts` gives None before the controller has measured anything."""
        super().__init__()
        self._notices = notices
        self._read = read
        self._read_drafts = read_drafts
        self._shown: list[Step] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog, TabbedContent():
            dialog.border_title = "Details"
            dialog.border_subtitle = "Tab, ←, → change the tab · Esc closes"
            with TabPane("Steps"):
                table: DataTable[str | Text] = DataTable(zebra_stripes=True, cursor_type="row")
                for name, width in _STEP_COLUMNS:
                    table.add_column(name, width=width)
                room = max(_MIN_REASON, self.app.size.width * 96 // 100 - _STEP_WIDTH)
                table.add_column("reason (in brackets: expected)", width=room)
                yield table
            with TabPane("Costs"), VerticalScroll():
                yield Static(id="costs", markup=False)
            with TabPane("Acceptance"), VerticalScroll():
                yield Static(id="acceptance", markup=False)

    async def on_mount(self) -> None:
        await self._refresh()
        self.set_interval(_INTERVAL_S, self._refresh)

    async def _refresh(self) -> None:
        meter, drafts = self._read(), await self._read_drafts()
        self.query_one("#costs", Static).update("\n\n".join([format_costs(drafts), *self._notices]))
        self.query_one("#acceptance", Static).update(format_acceptance(meter.metrics(), drafts))
        table = self.query_one(DataTable)
        steps = meter.steps[1:][-MAX_STEPS:]
        if table.cursor_row > 0 or steps == self._shown:
            return
        self._shown = steps
        table.clear()
        for step in reversed(steps):
            table.add_row(*format_step(step), height=None)  # long reasons take several lines


def format_step(step: Step) -> tuple[str | Text, ...]:
    decision = step.decision
    step_s = step.draft_s + step.verify_s + step.sample_s + step.commit_s
    return (
        str(step.index),
        decision.drafter if decision else "-",
        Text("●" * step.n_accepted + "○" * (step.n_drafted - step.n_accepted)),
        f"{len(step.tokens)} ({_format(decision.expected_tokens if decision else None)})",
        f"{step_s * 1000:.1f} ({_format(decision.expected_s if decision else None, 1000)})",
        Text(decision.reason if decision else "-"),
    )


def format_costs(draft_stats: DraftStats | None) -> str:
    """The measured cost of forwards of n rows and of a drafted token, in plain decode steps."""
    if draft_stats is None:
        return "Nothing measured yet: the controller has not drafted so far."
    costs = draft_stats.costs
    plain_s = costs.seconds(1)
    lines = [f"A plain decode step takes {plain_s * 1000:.1f} ms. A forward of n rows, in plain steps:", ""]
    highest = max(costs.seconds(n) for n in _ROWS) / plain_s
    for n in _ROWS:
        cost = costs.seconds(n) / plain_s
        lines.append(f"{n:4}  {draw_bar(cost / highest, _BAR_CELLS)} {cost:.2f}")
    for name, drafting in costs.profile.drafts.items():
        steps = {n: f"{costs.unit_s(name, n) / plain_s:.3f}" for n in sorted(drafting.units)}
        blocks = ", ".join(f"{cost} for {n}" for n, cost in steps.items())
        lines += ["", f"Tokens drafted by {name}, in plain steps: {blocks}."]
    return "\n".join(lines)


def format_acceptance(metrics: Metrics, draft_stats: DraftStats | None) -> str:
    """Acceptance by depth in this answer, and by match length over all texts."""
    by_depth = enumerate(metrics.alpha_by_depth, 1)
    lines = ["Acceptance by draft depth, in this answer:", ""]
    lines += [f"{depth:4}  {draw_bar(rate, _BAR_CELLS)} {rate:.0%}" for depth, rate in by_depth] or ["  none yet"]
    for name, stats in sorted(draft_stats.drafters.items()) if draft_stats is not None else ():
        if stats.confidence != "length":
            continue
        rates = ((n, stats.acceptance.rate(n)) for n in _MATCH_LENGTHS)
        lines += ["", f"Acceptance by match length, over all texts ({name}):", ""]
        lines += [f"{n:4}  {draw_bar(rate, _BAR_CELLS)} {rate:.0%}" for n, rate in rates]
    return "\n".join(lines)


def _format(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.1f}"
