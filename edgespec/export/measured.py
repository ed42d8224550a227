"""What the autopilot has stored of a drafter, as the figures of an export."""

from __future__ import annotations

from edgespec.controller.cost_model import Profile
from edgespec.controller.stats import DraftStats
from edgespec.export.plan import Measured

_MIN_EVIDENCE = 6.0  # tokens, discounted: those of one answer
_MAX_LENGTH = 15


def read_measured(stats: DraftStats, drafter: str) -> Measured | None:
    """Of `drafter` under the way of sampling of which most is known; None where it was hardly ever asked."""
    found = [
        (key, each.first_choice.evidence) for key, each in stats.drafters.items() if key.startswith(f"{drafter}; ")
    ]
    if not found:
        return None
    key, (accepted, tested) = max(found, key=lambda each: each[1][1])
    if tested < _MIN_EVIDENCE:
        return None
    acceptance = min(accepted / tested, 1.0)
    length, speedup = find_best_length(stats.costs.profile, drafter, acceptance)
    return Measured(acceptance, key.partition("; ")[2], length, speedup)


def find_best_length(profile: Profile, drafter: str, acceptance: float) -> tuple[int, float]:
    """(length, speedup over plain decoding) of the fastest chain whose tokens are each accepted at rate `acceptance`.

    (0, 1.0) if none is faster. A drafter whose time was not measured takes none.
    """
    cost = profile.drafts.get(drafter)
    best, expected, reached = (0, 1.0), 1.0, 1.0
    for length in range(1, min(_MAX_LENGTH, max(profile.rows) - 1) + 1):
        reached *= acceptance
        expected += reached
        seconds = profile.seconds(length + 1) + (cost.path_s(length) if cost is not None else 0.0)
        best = max(best, (length, expected * profile.seconds(1) / seconds), key=lambda each: each[1])
    return best
