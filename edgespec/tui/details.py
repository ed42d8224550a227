"""F2: the last rounds one by one, and what the autopilot knows of costs and acceptance."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Static, TabbedContent, TabPane

from edgespec.controller.stats import DraftStats
from edgespec.tui.live_stats import LiveStats, bar

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


class Details(ModalScreen[None]):
    """Rounds, newest first; costs by rows; acceptance by match length and by the draft's own probability."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f2,q", "dismiss", "Back")]

    def __init__(self, live_stats: LiveStats, draft_stats: DraftStats | None) -> None:
        super().__init__()
        self._gauges = live_stats
        self._draft_stats = draft_stats

    def compose(self) -> ComposeResult:
        with Vertical(classes="window") as window, TabbedContent():
            window.border_subtitle = "Tab, ←, → choose · Esc goes back"
            with TabPane("Rounds"):
                table: DataTable[str | Text] = DataTable(zebra_stripes=True, cursor_type="row")
                table.add_columns("round", "drafter", "drafted", "accepted", "tokens, expected", "ms, expected", "why")
                for step in reversed(self._gauges.rounds):
                    decision = step.decision
                    took = step.draft_s + step.verify_s + step.sample_s + step.commit_s
                    table.add_row(
                        str(step.index),
                        decision.source if decision else "-",
                        str(step.n_drafted),
                        Text("●" * step.n_accepted + "○" * (step.n_drafted - step.n_accepted)),
                        f"{len(step.tokens)}, {_shown(decision.expected_tokens if decision else None)}",
                        f"{took * 1000:.1f}, {_shown(decision.expected_s if decision else None, 1000)}",
                        decision.reason if decision else "-",
                    )
                yield table
            with TabPane("Costs"), VerticalScroll():
                yield Static(costs(self._draft_stats), markup=False)
            with TabPane("Acceptance"), VerticalScroll():
                yield Static(acceptances(self._gauges, self._draft_stats), markup=False)


def costs(draft_stats: DraftStats | None) -> str:
    """Forwards by rows in plain steps, and a drafted token, as bars."""
    if draft_stats is None:
        return "Nothing has been measured yet: the autopilot has not been asked."
    known = draft_stats.costs
    plain_s = known.seconds(1)
    lines = [f"A plain step takes {plain_s * 1000:.1f} ms. A forward of n rows, in plain steps:", ""]
    most = max(known.seconds(n) for n in _ROWS) / plain_s
    for n in _ROWS:
        steps = known.seconds(n) / plain_s
        lines.append(f"{n:4}  {bar(steps / most, 40)} {steps:.2f}")
    if known.profile.draft_s is not None:
        lines += ["", f"A drafted token: {known.draft_s / plain_s:.3f} plain steps."]
    return "\n".join(lines)


def acceptances(live_stats: LiveStats, draft_stats: DraftStats | None) -> str:
    """By depth in this answer; by match length over all texts."""
    lines = ["Drafted tokens that were right, by depth, in this answer:", ""]
    lines += [f"{depth:4}  {bar(alpha, 40)} {alpha:.0%}" for depth, alpha in enumerate(live_stats.alphas, 1)] or [
        "  none yet"
    ]
    for name, matches in sorted(draft_stats.matches.items()) if draft_stats is not None else ():
        lines += ["", f"Lookups that were right, by the length of the match ({name}):", ""]
        lines += [f"{n:4}  {bar(matches.rate(n), 40)} {matches.rate(n):.0%}" for n in (1, 2, 3, 4, 6, 8, 12, 16)]
    return "\n".join(lines)


def _shown(value: float | None, times: float = 1.0) -> str:
    return "-" if value is None else f"{value * times:.1f}"
