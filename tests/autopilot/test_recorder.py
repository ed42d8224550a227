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
    step = Step(1, (1,), int(drafts), 0, int(drafts), 0.0, verify_s=1.0, sample_s=0.15, commit_s=0.05, n_peer_rows=2)
    for _ in range(20):
        if drafts:
            recorder.record(round_, step)
        else:
            recorder.record_plain(step)
    assert cost.model.seconds(3 + drafts) == pytest.approx(1.6)


def test_a_round_without_a_draft_is_recorded_as_a_plain_one() -> None:
    profile = Profile({1: 1.0, 8: 8.0})
    costs = []
    for is_decided in (False, True):
        cost, stats = MarginalCost(CostModel(profile)), TextStats(DraftStats(profile), "sample at 0.0")
        recorder = RoundRecorder(cost, stats)
        round_ = DraftRound(cost, stats, DrafterSet([], 16), [1] * 10, Budget(9, 9), 1.0, is_chain=True)
        step = Step(1, (1,), 0, 0, 0, at_s=0.0, verify_s=1.5)
        for _ in range(20):
            if is_decided:
                assert not recorder.record(round_, step)
            else:
                recorder.record_plain(step)
        costs.append((cost.model.seconds(1), recorder.tokens_per_step, recorder.regret.allowance()))
    assert costs[0] == costs[1] and costs[0][0] == 1.5


@pytest.mark.parametrize("limit", [0, 4, 15, 17, 63])
def test_a_draft_may_have_as_many_nodes_as_its_rejection_may_cost(limit: int) -> None:
    def find(rows: dict[int, float]) -> int:
        cost = MarginalCost(CostModel(Profile(rows)))
        return RoundRecorder(cost, TextStats(DraftStats(Profile(rows)), "greedy")).find_max_nodes(limit)

    assert find({1: 1.0, 64: 1.5}) == limit
    assert find({1: 1.0, 5: 1.9, 64: 40.0}) == min(limit, 4)
