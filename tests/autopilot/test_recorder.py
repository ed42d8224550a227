"""What a round that shares its forward with other generations teaches of costs."""

from __future__ import annotations

import pytest

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.drafter_set import DrafterSet
from edgespec.autopilot.marginal_cost import MarginalCost
from edgespec.autopilot.profile import Profile
from edgespec.autopilot.recorder import RoundRecorder
from edgespec.autopilot.round import DraftRound
from edgespec.autopilot.stats import DraftStats, TextStats
from edgespec.core.drafter import Budget
from edgespec.core.peers import BatchPeers
from edgespec.core.protocols import Step


@pytest.mark.parametrize("drafts", [False, True])
def test_the_sampling_of_all_generations_is_a_part_of_a_shared_forward(drafts: bool) -> None:
    """Each of three samples for 0.2 s, after a forward of a second."""
    profile = Profile({1: 1.0, 8: 8.0})
    cost = MarginalCost(CostModel(profile), lambda: BatchPeers(sessions=2, rows=2, prefilling=False))
    stats = TextStats(DraftStats(profile), "sample at 0.0")
    recorder = RoundRecorder(cost, stats)
    cost.begin_round(10)
    round_ = DraftRound(cost, stats, DrafterSet([], 16), [1] * 10, Budget(0, 0), 1.0, is_chain=True)
    step = Step(1, (1,), 0, 0, 0, at_s=0.0, verify_s=1.0, sample_s=0.15, commit_s=0.05, n_peer_rows=2)
    for _ in range(20):
        if drafts:
            recorder.record(round_, step)
        else:
            recorder.record_plain(step)
    assert cost.model.seconds(3) == pytest.approx(1.6)
