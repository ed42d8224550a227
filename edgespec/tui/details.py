"""F2: the latest steps, and what the controller has measured about costs and acceptance, while it changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Static, TabbedContent, TabPane

from edgespec.controller.stats import DraftStats
from edgespec.core.protocols import Step
from edgespec.tui.bars import draw_bar
from edgespec.tui.live_stats import LiveStats

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # of the forwards whose cost is shown
_MATCH_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_BAR_CELLS = 40
_MAX_STEPS = 100
_INTERVAL_S = 0.5


class Details(ModalScreen[None]):
    """Three tabs: steps, the newest first; cost by rows, and what was said while the model was loaded; acceptance by
    depth and by length of the n-gram match.

    The steps stand still while one other than the newest is selected.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f2,q", "dismiss", "Back")]

    def __init__(
        self,
        read: Callable[[], LiveStats],
        read_drafts: Callable[[], Awaitable[DraftStats | None]],
        load_notices: Sequence[str],
    ) -> None:
        """`read_drafts` gives None before the controller has measured anything."""
        super().__init__()
        self._load_notices = load_notices
        self._read = read
        self._read_drafts = read_drafts
        self._shown: list[Step] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog, TabbedContent():
            dialog.border_title = "Details"
            dialog.border_subtitle = "Tab, ←, → change the tab · Esc closes"
            with TabPane("Steps"):
                table: DataTable[str | Text] = DataTable(zebra_stripes=True, cursor_type="row")
                table.add_columns(
                    "step", "drafter", "drafted", "accepted", "tokens / expected", "ms / expected", "reason"
                )
                yield table
            with TabPane("Costs"), VerticalScroll():
                yield Static(id="costs", markup=False)
            with TabPane("Acceptance"), VerticalScroll():
                yield Static(id="acceptance", markup=False)

    async def on_mount(self) -> None:
        await self._refresh()
        self.set_interval(_INTERVAL_S, self._refresh)

    async def _refresh(self) -> None:
        stats, drafts = self._read(), await self._read_drafts()
        self.query_one("#costs", Static).update("\n\n".join([format_costs(drafts), *self._load_notices]))
        self.query_one("#acceptance", Static).update(format_acceptance(stats, drafts))
        table = self.query_one(DataTable)
        steps = list(stats.steps)[-_MAX_STEPS:]
        if table.cursor_row > 0 or steps == self._shown:
            return
        self._shown = steps
        table.clear()
        table.add_rows(format_step(step) for step in reversed(steps))


def format_step(step: Step) -> tuple[str | Text, ...]:
    """The cells of a step's row."""
    decision = step.decision
    step_s = step.draft_s + step.verify_s + step.sample_s + step.commit_s
    return (
        str(step.index),
        decision.source if decision else "-",
        str(step.n_drafted),
        Text("●" * step.n_accepted + "○" * (step.n_drafted - step.n_accepted)),
        f"{len(step.tokens)} / {_format(decision.expected_tokens if decision else None)}",
        f"{step_s * 1000:.1f} / {_format(decision.expected_s if decision else None, 1000)}",
        decision.reason if decision else "-",
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
        one = f"A token drafted by {name} takes {steps.get(1)} plain steps."
        lines += ["", one if steps.keys() == {1} else f"A block of tokens drafted by {name}, in plain steps: {blocks}."]
    return "\n".join(lines)


def format_acceptance(live_stats: LiveStats, draft_stats: DraftStats | None) -> str:
    """Acceptance by depth in this answer, and by match length over all texts."""
    by_depth = enumerate(live_stats.acceptance.by_depth, 1)
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
