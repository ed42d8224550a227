"""The autopilot with drafters of every kind: forced rounds, drawn chains, unknown costs, failures, agreements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.autopilot.steered import SteeredController
from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Controller, Round, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching, TokenRejection
from edgespec.drafters.ngram import NgramDrafter
from tests.core.toys import decode

V, N = 8, 60
MODEL, GREEDY, PROMPT = ToyModel(2, V), Sampler(SamplingParams(temperature=0), V), [1, 2, 3, 4]
TEXT = decode(MODEL, GREEDY, 0, PROMPT, N, frozenset(), 256)


class Oracle(Drafter):
    """Knows the text: drafts it, or a wrong token instead; keeps the rounds that it hears of."""

    def __init__(self, name: str = "model", *, wrong: bool = False, is_drawn: bool = False) -> None:
        self.name = name
        self.can_draw = is_drawn
        self._wrong = wrong
        self.heard: list[Round] = []
        self.drafted: list[int] = []  # tokens of each expand

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self.is_drawn = self.can_draw
        self.heard = []

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        node, at = -1, len(text) - len(PROMPT)
        self.drafted.append(0)
        for token in TEXT[at : at + limit.depth]:
            token = (token + 1) % V if self._wrong else token
            q = np.full(V, 0.02)
            q[token] = 1 - 0.02 * (V - 1)
            node = tree.add(node, token, self.name, 0.86, q if self.is_drawn else None)
            self.drafted[-1] += 1
            yield

    def observe(self, done: Round) -> Sequence[Outcome]:
        self.heard.append(replace(done, text=list(done.text)))
        return ()


class Steady(CostModel):
    """Measures what the profile says, whatever the clock says."""

    def observe(self, rows: int, position: int, seconds: float) -> None:
        super().observe(rows, position, self.profile.seconds(rows))

    def observe_drafting(self, drafter: str, seconds: float, expected_s: float) -> None:
        super().observe_drafting(drafter, expected_s, expected_s)


def steady(*names: str) -> DraftStats:
    """Statistics of a machine on which drafting and verifying are cheap."""
    draft_stats = DraftStats(Profile({1: 1.0, 16: 1.3}, dict.fromkeys(names, DraftCost({1: 0.05}))))
    draft_stats.costs = Steady(draft_stats.costs.profile)
    return draft_stats


def adaptive(drafters: Sequence[Drafter], draft_stats: DraftStats, *, trees: bool = True) -> Adaptive:
    return Adaptive(drafters, draft_stats, "greedy", V, takes_trees=lambda: trees)


def run(controller: Controller, *, drawn: bool = False) -> tuple[list[Step], list[str]]:
    """(steps, the origin of each token) of a greedy text."""
    origins: list[str] = []

    def emit(token: int, origin: str) -> bool:
        origins.append(origin)
        return False

    rule = TokenRejection if drawn else SampleMatching
    verifier = rule(GREEDY, CounterRng(0))
    events = speculate(ToySession(MODEL), controller, verifier, PROMPT, max_tokens=N, stop=frozenset(), emit=emit)
    steps = [event for event in events if isinstance(event, Step)]
    controller.end()
    assert [token for step in steps for token in step.tokens] == TEXT
    return steps, origins


def forced_after(text: Sequence[int]) -> list[int]:
    """A grammar that forces the tokens at the first three of every seven positions."""
    at = len(text) - len(PROMPT)
    return TEXT[at : at + max(0, 3 - len(text) % 7)]


def seconds(rows: int) -> float:
    return 1.0 + 0.02 * (rows - 1)


def forced_by(
    controller: Controller,
    forced: Callable[[Sequence[int]], list[int]] = forced_after,
    kind: type[SteeredController] = SteeredController,
) -> SteeredController:
    return kind(controller, forced=forced, seconds=seconds)


@pytest.mark.parametrize("wrong", [False, True])
def test_drafters_hear_of_rounds_that_a_grammar_has_drafted(wrong: bool) -> None:
    model, lookup, draft_stats = Oracle(wrong=wrong), NgramDrafter(), steady("model")
    controller = forced_by(adaptive([lookup, model], draft_stats))
    steps, origins = run(controller)
    assert [done.emitted for done in model.heard] == [step.tokens for step in steps[1:]], "of every round"
    assert [done.text for done in model.heard][-1] == [*PROMPT, *TEXT]
    forced = [i for i, step in enumerate(steps[1:]) if step.decision and step.decision.drafter == "structure"]
    assert forced and "structure" in origins
    for i in forced:
        done = model.heard[i]
        before = done.text[: len(done.text) - len(done.emitted)]
        assert done.draft.tokens.tolist() == forced_after(before)[: len(done.draft)]
        assert len(done.path) == len(done.draft) == done.n_tested
    assert lookup._lookup.tokens == [*PROMPT, *TEXT]


def test_forced_rounds_are_neither_costs_nor_gains() -> None:
    """With every round forced, nothing is learned of costs, of the drafter or of the regret."""

    seen: list[int] = []

    class Costs(Steady):
        def observe(self, rows: int, position: int, seconds: float) -> None:
            seen.append(rows)
            super().observe(rows, position, seconds)

    draft_stats = steady("model")
    draft_stats.costs = Costs(draft_stats.costs.profile)
    model = Oracle()
    controller = adaptive([model], draft_stats)
    before = controller._recorder.regret.allowance()
    steps, _ = run(forced_by(controller, lambda text: TEXT[len(text) - len(PROMPT) :][:3]))
    n_forced = sum(step.decision is not None and step.decision.drafter == "structure" for step in steps)
    assert n_forced >= len(steps) - 2 and len(seen) == len(steps) - 1 - n_forced
    assert controller._recorder.regret.allowance() == pytest.approx(before, abs=0.05)
    assert not model.drafted and "model; greedy, answer" not in draft_stats.drafters


def test_a_forced_round_after_a_drafted_one_is_not_taken_for_its_outcome() -> None:
    """The drafter is always wrong; the tokens of the forced rounds are right and must not count for it."""
    model, draft_stats = Oracle(wrong=True), steady("model")
    run(forced_by(adaptive([model], draft_stats)))
    assert sum(model.drafted) > 0
    right, tested = draft_stats.drafters["model; greedy, answer"].first_choice.evidence
    assert right == 0.0 and tested > 0
    model, draft_stats = Oracle(), steady("model")
    run(forced_by(adaptive([model], draft_stats)))
    right, tested = draft_stats.drafters["model; greedy, answer"].first_choice.evidence
    assert right == pytest.approx(tested) and tested > 5


def test_a_drawn_chain_is_verified_whole() -> None:
    model, draft_stats = Oracle(is_drawn=True), steady("model")
    controller = adaptive([NgramDrafter(), model], draft_stats)
    _, origins = run(controller, drawn=True)
    drafted = [done.draft for done in model.heard if done.draft.q is not None]
    assert [len(draft) for draft in drafted] == [n for n in model.drafted if n], "no drawn token is dropped"
    assert max(map(len, drafted)) > 3 and all(draft.is_chain for draft in drafted)
    assert all(set(draft.drafters) == {"model"} for draft in drafted)
    assert "model" in origins
    right, tested = draft_stats.drafters["model; greedy, answer"].first_choice.evidence
    assert tested > 5 and right == pytest.approx(tested), "also in the round that ends the text"


def test_a_drafter_of_unknown_cost_is_not_asked_and_the_others_go_on() -> None:
    unknown, known = Oracle("new"), Oracle("model")
    controller = adaptive([unknown, known], steady("model"))
    steps, _ = run(controller)
    assert not unknown.drafted and known.drafted and not controller.failures
    assert len(unknown.heard) == len(steps) - 1, "it hears of every round"
    draft_stats = steady("model")
    draft_stats.costs.add_drafters({"new": DraftCost({1: 0.05})})
    run(adaptive([unknown], draft_stats))
    assert unknown.drafted


@pytest.mark.parametrize("trees", [True, False])
def test_a_drafter_that_fails_costs_its_proposals_alone(trees: bool) -> None:
    class Failing(Oracle):
        def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
            for unit in super().expand(tree, text, limit):
                yield unit
                if self.drafted[-1] == 2:
                    raise ValueError("it is broken")

    failing, model = Failing("failing"), Oracle("model")
    controller = adaptive([model, failing], steady("failing", "model"), trees=trees)
    steps, _ = run(controller)
    assert dict(controller.failures) == {"failing": "it is broken."}
    assert len(failing.drafted) == 1 and model.drafted
    assert len(failing.heard) < len(steps) - 1 == len(model.heard)


def test_a_free_drafter_is_scored_on_every_token() -> None:
    class Knowing(NgramDrafter):
        """Takes no time, is right, and says so."""

        name = "knowing"

        def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
            return iter(())

        def observe(self, done: Round) -> Sequence[Outcome]:
            return [Outcome(20.0, True)] * len(done.emitted)

    draft_stats = steady()
    run(adaptive([Knowing()], draft_stats))
    acceptance = draft_stats.drafters["knowing; greedy, answer"].acceptance
    assert acceptance.rate(20.0) > 0.93 and acceptance.rate(3.0) == pytest.approx(0.5), "though it proposes nothing"
    assert sum(rate.evidence[1] for rate in acceptance.rates) > 5


class Whole(Oracle):
    """Drafts a block in one unit of work."""

    block_size = 16

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        list(super().expand(tree, text, limit))
        yield


@pytest.mark.parametrize(("row_s", "length"), [(0.02, 7), (0.2, 3), (0.5, 1)])
def test_the_tokens_of_a_block_are_worth_their_rows(row_s: float, length: int) -> None:
    """Of a drafter of which nothing is known yet: its n-th token is right with a probability of 0.6^n."""
    model, draft_stats = Whole(), steady()
    costs = {"model": DraftCost({1: 0.05, 16: 0.1})}
    draft_stats.costs = Steady(Profile({1: 1.0, 16: 1.0 + 15 * row_s}, costs))
    run(adaptive([model], draft_stats))
    assert model.drafted[0] == length


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


def test_the_next_drafter_is_asked_where_one_says_nothing() -> None:
    silent, model, draft_stats = Silent("silent", works=False), Oracle("model"), steady("silent", "model")
    for _ in range(3):  # so that it is known to pay
        run(adaptive([model], draft_stats))
    steps, _ = run(adaptive([silent, model], draft_stats))
    drafted = [step for step in steps if step.decision and step.decision.drafter == "model"]
    assert silent.asked and len(drafted) >= silent.asked
    assert len(steps) == len(run(adaptive([model], draft_stats))[0]), "as with the other one alone"


def test_a_drafter_is_charged_with_its_usual_time() -> None:
    """It usually takes half a plain step and proposes nothing; here it takes no time."""
    model, draft_stats = Silent("model", works=True), steady()
    draft_stats.costs = Steady(Profile({1: 1.0, 16: 1.3}, {"model": DraftCost({1: 0.5})}))
    run(adaptive([model], draft_stats))
    assert model.asked <= 20
