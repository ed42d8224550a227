"""What the autopilot has stored of a drafter, as the figures of an export."""

from __future__ import annotations

from edgespec.autopilot.stats import DraftStats
from edgespec.export.plan import Measured

_MIN_EVIDENCE = 6.0  # tokens, discounted: those of one answer


def read_measured(stats: DraftStats, drafter: str) -> Measured | None:
    """Read what is known of `drafter` under its most frequent way of sampling; None if it was hardly ever asked."""
    found = [
        (key, each.first_choice.evidence) for key, each in stats.drafters.items() if key.startswith(f"{drafter}; ")
    ]
    if not found:
        return None
    key, (accepted, tested) = max(found, key=lambda each: each[1][1])
    if tested < _MIN_EVIDENCE:
        return None
    acceptance = min(accepted / tested, 1.0)
    return Measured(acceptance, key.partition("; ")[2])
