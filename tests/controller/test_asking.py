"""Which drafters a round of the autopilot asks, and what it learns where one says nothing or a grammar drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from edgespec.controller.cost_model import DraftCost, Profile
from edgespec.controller.fixed import JumpForward
from edgespec.core.protocols import Budget, Draft, Round, Step
from edgespec.core.tree import DraftTree
from tests.controller.test_policies import PROMPT, TEXT, Oracle, Steady, adaptive, forced_after, run, seconds, steady


class Free(Oracle):
    is_free = True


class Silent(Oracle):
    """Has nothing to propose: says so after a unit of work, or has no unit."""

    def __init__(self, name: str, *, works: bool) -> None:
        super().__init__(name)
        self._works = works
        self.asked = 0

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self.asked += 1
        if self._works:
            yield


class Lazy(Oracle):
    """Makes chains that it need not read; always wrong."""

    is_async = True

    def draft_async(self, text: Sequence[int], limit: Budget) -> Draft | None:
        at = len(text) - len(PROMPT)
        return Draft.chain([(token + 1) % 8 for token in TEXT[at : at + limit.depth]])


def test_a_phase_may_begin_with_a_forced_round() -> None:
    """Tokens of the round before, which two drafters had proposed, are not compared with it."""

    class Phases(JumpForward):
        rounds = 0

        def record(self, step: Step) -> None:
            super().record(step)
            self.rounds += 1
            self.set_phase(("answer", "reasoning")[self.rounds % 2])

    _, origins = run(Phases(adaptive([Free("free"), Oracle("model")], steady("model")), forced_after, seconds))
    assert {"structure", "free+model"} <= set(origins)


def test_agreements_are_not_compared_with_forced_tokens() -> None:
    controller = adaptive([Free("free"), Oracle("model")], steady("model"))
    compared: list[bool] = []
    controller._stats.observe_agreement = lambda votes, is_right: compared.append(is_right)  # type: ignore[method-assign]

    class Watched(JumpForward):
        n_forced = 0

        def observe(self, done: Round) -> None:
            before = len(compared)
            super().observe(done)
            if self.decision.source == "structure":
                self.n_forced += 1
                assert len(compared) == before

    watched = Watched(controller, forced_after, seconds)
    run(watched)
    assert watched.n_forced >= 2 and compared


def test_the_next_drafter_is_asked_where_one_says_nothing() -> None:
    silent, model, draft_stats = Silent("silent", works=False), Oracle("model"), steady("silent", "model")
    for _ in range(3):  # so that it is known to pay
        run(adaptive([model], draft_stats))
    steps, _ = run(adaptive([silent, model], draft_stats))
    drafted = [step for step in steps if step.decision and step.decision.source == "model"]
    assert silent.asked and len(drafted) >= silent.asked
    assert len(steps) == len(run(adaptive([model], draft_stats))[0]), "as with the other one alone"


def test_a_unit_without_proposals_is_no_cost_of_the_target() -> None:
    """Its seconds are taken from no forward, whose time would seem shorter."""
    draft_stats = steady("silent")
    found: list[float] = []
    observe = draft_stats.costs.observe

    def note(rows: int, position: int, seconds: float) -> None:
        found.append(seconds)
        observe(rows, position, seconds)

    draft_stats.costs.observe = note  # type: ignore[method-assign]
    steps, _ = run(adaptive([Silent("silent", works=True)], draft_stats))
    assert any(step.decision and step.decision.drafted for step in steps)
    assert found == [step.forward_s(1) for step in steps[1:]]


def test_a_chain_that_joins_no_tree_is_not_asked_for_after_another() -> None:
    """A trial of it would cost its share of the time and measure nothing."""
    model, lazy, draft_stats = Oracle("model"), Lazy("lazy"), steady("model", "lazy")
    spent: list[float] = []
    spend = draft_stats.exploration.spend

    def note(steps: float) -> bool:
        is_spent = spend(steps)
        spent.extend([steps] * is_spent)
        return is_spent

    draft_stats.exploration.spend = note  # type: ignore[method-assign]
    steps, _ = run(adaptive([model, lazy], draft_stats))
    trials = [step for step in steps if step.decision and "measure the drafter" in step.decision.reason]
    assert trials and len(spent) == len(trials)
    assert not any(key.startswith("lazy after") for key in draft_stats.after)


def test_a_drafter_that_fails_before_it_is_asked_is_not_asked() -> None:
    class Failing(Oracle):
        def pending_tokens(self, text: Sequence[int]) -> int:
            raise ValueError("it is broken")

    failing, model = Failing("failing"), Oracle("model")
    controller = adaptive([failing, model], steady("failing", "model"))
    run(controller)
    assert list(controller.failures) == ["failing"] and not failing.drafted and model.drafted


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_drafter_that_runs_ahead_is_charged_with_the_time_that_it_took(is_ahead: bool) -> None:
    """It usually takes half a plain step and proposes nothing; here it takes no time."""
    model, draft_stats = Silent("model", works=True), steady()
    model.runs_ahead = is_ahead
    draft_stats.costs = Steady(Profile({1: 1.0, 16: 1.3}, {"model": DraftCost({1: 0.5})}))
    run(adaptive([model], draft_stats))
    assert (model.asked > 20) == is_ahead
