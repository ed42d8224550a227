"""The autopilot asks a draft model for a tree where rows cost little, and for one path elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.toy_session import Kind, ToyModel
from edgespec.core.draft_tree import DraftTree
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from tests.core.toys import open_session

V = 6


class FixedCosts(CostModel):
    """Costs that no measurement changes."""

    def observe(self, rows: int, position: int, seconds: float) -> None:
        super().observe(rows, position, self.profile.seconds(rows))

    def observe_drafting(self, drafter: str, seconds: float, expected_s: float) -> None: ...


class Recorder(SequentialDrafter):
    """Notes what it was asked for, and how many nodes each of its units continued."""

    def __init__(self, session: ModelDraftSession) -> None:
        super().__init__("model", session)
        self.limits: list[Budget] = []
        self.continued: list[int] = []

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self.limits.append(limit)
        before = 0
        for _ in super().expand(tree, text, limit):
            inner = len({*tree.parents})
            self.continued.append(inner - before)
            before = inner
            yield


def draft_with(rows: dict[int, float], kind: Kind) -> Recorder:
    """The drafter after a text of a target whose forwards cost `rows`, and whose own takes 0.05 of a plain step."""
    model, noisy = ToyModel(3, V, 2, 1.5), ToyModel(3, V, 2, 1.2)
    drafter = Recorder(ModelDraftSession(open_session("tree", noisy), V))
    stats = DraftStats(Profile(rows, {"model": DraftCost({1: 0.05}, 0.001)}))
    stats.costs = FixedCosts(stats.costs.profile)
    session, sampler = open_session(kind, model), Sampler(SamplingParams(temperature=0), V)
    controller = Adaptive([drafter], stats, "toy", V, takes_trees=lambda: session.capabilities.tree)
    verifier = SampleMatching(sampler, CounterRng(1))
    for _ in speculate(session, controller, verifier, [1, 2, 3], max_tokens=80, stop=frozenset()):
        pass
    assert drafter.limits and not controller.failures
    return drafter


def test_flat_costs_ask_for_trees() -> None:
    drafter = draft_with({1: 1.0, 64: 1.05}, "tree")
    assert all(limit.has_branches for limit in drafter.limits)
    assert max(drafter.continued) > 2, "several nodes in one unit"


@pytest.mark.parametrize(("rows", "kind"), [({1: 1.0, 8: 6.0, 64: 40.0}, "tree"), ({1: 1.0, 64: 1.05}, "linear")])
def test_dear_rows_and_targets_without_branches_ask_for_one_path(rows: dict[int, float], kind: Kind) -> None:
    drafter = draft_with(rows, kind)
    assert not any(limit.has_branches for limit in drafter.limits)
    assert max(drafter.continued) == 1
