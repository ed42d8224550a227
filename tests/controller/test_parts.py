"""The parts of the controller: costs, means, acceptance, draft trees, regret budget, statistics between runs."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.controller.acceptance import AcceptanceModel, model_by_match_length, model_by_probability
from edgespec.controller.cost_model import CostModel, Profile
from edgespec.controller.draft_tree import DraftTree
from edgespec.controller.estimator import DecayedMean
from edgespec.controller.regret import RegretBudget
from edgespec.controller.stats import DraftStats
from edgespec.controller.value import DraftSize, choose_size, list_sizes
from edgespec.core.tree import check_draft, path_to


def test_costs_between_the_profiles_points() -> None:
    costs = CostModel(Profile({1: 10.0, 4: 16.0, 8: 40.0}))
    assert [costs.seconds(rows) for rows in (1, 2, 4, 6, 8, 10)] == pytest.approx([10, 12, 16, 28, 40, 52])
    assert CostModel(Profile({1: 10.0})).seconds(3) == 30.0
    assert CostModel(Profile({1: 10.0, 4: 12.0, 5: 4.0})).seconds(9) == 5.0, "a falling end does not fall for ever"
    for rows, draft_s, read_s in (
        ({2: 1.0}, None, 0.0),
        ({1: 0.0}, None, 0.0),
        ({1: 1.0}, -1.0, 0.0),
        ({1: 1.0}, 1.0, -1.0),
    ):
        with pytest.raises(ValueError, match="one row"):
            Profile(rows, draft_s, read_s)


def test_costs_follow_the_clock() -> None:
    costs = CostModel(Profile({1: 10.0, 4: 16.0, 8: 40.0}))
    costs.observe(4, 0, 160.0)
    assert costs.seconds(4) == pytest.approx(24.0), "one slow round may be of a busy moment"
    costs.observe(4, 0, 15.0)
    assert costs.seconds(4) == 16.0
    for _ in range(20):
        costs.observe(1, 0, 20.0)
    costs.observe(1, 0, 900.0)
    assert costs.seconds(1) == 20.0, "an outlier is one among fifteen"
    assert costs.seconds(8) == pytest.approx(80.0), "the machine has become half as fast"
    for _ in range(300):
        costs.observe(2, 0, 36.0)
    assert costs.seconds(2) == pytest.approx(36.0)
    assert (costs.count_recent(1), costs.seconds(1)) == (0, 10.0), "what was measured long ago counts no more"


def test_rows_not_seen_are_as_far_off_the_profile_as_those_that_were() -> None:
    costs = CostModel(Profile({1: 10.0, 2: 11.0, 4: 12.0, 8: 14.0}))
    for _ in range(15):
        for rows in (1, 2, 4):
            costs.observe(rows, 0, 10.0 * rows)
    assert costs.seconds(4) == pytest.approx(40.0)
    assert 14.0 * 1.8 < costs.seconds(8) < 14.0 * 3.4


def test_plain_costs_are_those_near_the_position() -> None:
    costs = CostModel(Profile({1: 10.0, 2: 15.0}))
    for _ in range(15):
        costs.observe(1, 100, 12.0)
    costs.begin(400)
    assert costs.seconds(1) == 12.0
    costs.begin(4000)
    assert (costs.count_recent(1), costs.seconds(1)) == (0, 10.0)
    for _ in range(15):
        costs.observe(1, 4000, 30.0)
    costs.begin(5900)
    assert costs.seconds(1) == 30.0, "less than half of the way"
    assert costs.seconds(2) == pytest.approx(45.0)


def test_draft_and_reading_costs() -> None:
    costs = CostModel(Profile({1: 10.0}, 2.0, 0.5))
    assert (costs.draft_s, costs.read_s) == (2.0, 0.5)
    for _ in range(15):
        costs.observe_drafted(4.0)
    assert (costs.draft_s, costs.read_s) == (4.0, 1.0), "reading is slower where drafting is"


def test_rates() -> None:
    rate = DecayedMean(0.6)
    assert rate.value == pytest.approx(0.6)
    for _ in range(300):
        rate.observe(1.0)
    assert rate.value > 0.9
    rate = after(rate)
    assert 0.7 < rate.value < 0.9, "a long text counts for a few observations in the next"
    for _ in range(30):
        rate = after(rate)
        rate.observe(0.0)
    rate = after(rate)
    assert rate.value < 0.45, "the texts of long ago are forgotten"
    other = DecayedMean(0.6)
    other.restore(rate.evidence)
    assert other.value == pytest.approx(rate.value)


def test_concurrent_texts_see_only_themselves_and_earlier_texts() -> None:
    rate = DecayedMean(0.6)
    one, two = rate.fork(), rate.fork()
    for _ in range(30):
        one.observe(1.0)
        two.observe(0.0)
    assert one.value > 0.85 and two.value < 0.15 and rate.value == 0.6
    rate.merge(one)
    alone = rate.evidence
    rate.merge(two)
    assert rate.evidence[1] > alone[1] and 0.4 < rate.fork().value < 0.6
    rate.merge(rate.fork())
    assert rate.evidence[1] == pytest.approx(alone[1] * 0.9 + 6), "a text that showed nothing changes nothing"


def after(rate: DecayedMean) -> DecayedMean:
    """For the next text, when `rate`'s is over."""
    next_ = DecayedMean(0.6)
    next_.restore(rate.evidence)
    return next_


def test_acceptance_bins_are_independent() -> None:
    acceptance = model_by_probability()
    for _ in range(100):
        acceptance.observe(0.99, is_right=False)
    assert acceptance.rate(0.99) < 0.2, "a drafter that is always sure and always wrong"
    assert acceptance.rate(0.3) == pytest.approx(0.27)
    lengths = model_by_match_length()
    assert [lengths.rate(n) for n in (2, 3, 40)] == pytest.approx([0.4, 0.5, 0.95])
    with pytest.raises(ValueError, match="one guess"):
        AcceptanceModel([0.5], [0.1])


def test_candidates_merge_and_the_most_probable_fill_the_rows() -> None:
    found = DraftTree()
    found.add_chain([5, 6, 7], [0.5, 0.8, 0.8])
    path = found.add(-1, 5, 0.9)
    found.add(-1, 8, 0.1)
    assert found.add(path, 9, 0.3) == 4
    assert found.probabilities == pytest.approx([0.9, 0.4, 0.32, 0.1, 0.27])
    draft = found.select_draft(4)
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([5, 6, 7, 9], [-1, 0, 1, 0])
    assert len(found.select_draft(0)) == 0


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 4), st.floats(0, 1)), max_size=25), st.integers(0, 25))
def test_any_tree_gives_a_valid_draft_of_its_best_nodes(nodes: list[tuple[int, int, float]], n: int) -> None:
    found = DraftTree()
    for parent, token, rate in nodes:
        found.add(min(parent, len(found)) - 1, token, rate)
    n = min(n, len(found))
    draft = found.select_draft(n)
    check_draft(draft, 5)
    assert len(draft) == n
    paths = {
        tuple(found.tokens[i] for i in _path(found, node)): found.probabilities[node] for node in range(len(found))
    }
    assert len(paths) == len(found), "no path twice"
    kept = [paths[tuple(draft.tokens[list(path_to(draft, node))].tolist())] for node in range(n)]
    assert sorted(kept, reverse=True) == pytest.approx(sorted(paths.values(), reverse=True)[:n])


def _path(found: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = found.parents[node]
    return path


def test_every_size_is_compared() -> None:
    seconds = {1: 1.0, 2: 1.7, 3: 2.3, 4: 1.3, 5: 1.9}
    rows = list_sizes([0.6, 0.2, 0.4, 0.1], seconds.__getitem__, 0.0, 4)
    assert [(r.nodes, round(r.tokens, 6)) for r in rows] == [(0, 1.0), (1, 1.6), (2, 2.0), (3, 2.2), (4, 2.3)]
    best, price = choose_size(rows, recent_rate=1.0)
    assert (best.nodes, price) == (3, pytest.approx(2.2 / 1.3)), "beyond two rows that do not pay"
    best, price = choose_size(rows, recent_rate=3.0)
    assert (best.nodes, price) == (3, 3.0)
    best, _ = choose_size(list_sizes([0.09] * 4, seconds.__getitem__, 0.0, 4), recent_rate=1.0)
    assert best == DraftSize(0, 1.0, 1.0), "plain decoding is one of them"


@given(st.lists(st.floats(0, 1), max_size=8), st.lists(st.floats(0.1, 9), min_size=9, max_size=9), st.floats(0.1, 3))
def test_the_choice_is_the_best_of_all(probabilities: list[float], seconds: list[float], recent_rate: float) -> None:
    rows = list_sizes(probabilities, lambda n: seconds[n - 1], 0.3, 8)
    best, price = choose_size(rows, recent_rate)
    sums = [1 + sum(sorted(probabilities, reverse=True)[:n]) for n in range(len(probabilities) + 1)]
    speeds = [tokens / (0.3 + seconds[n]) for n, tokens in enumerate(sums)]
    assert price == pytest.approx(max(recent_rate, *speeds, 0.0))
    if max(speeds) >= recent_rate:
        assert best.speed == pytest.approx(max(speeds))


def test_the_regret_budget() -> None:
    budget = RegretBudget()
    assert budget.allowance() == pytest.approx(2.0)
    budget.add(1, 2.5)
    assert budget.allowance() == pytest.approx(2.0 - 1.5 + 0.025)
    for _ in range(100):
        budget.add(1, 1.0)
    assert budget.allowance() == pytest.approx(0.5 + 1.025), "a hundredth of the time"
    for _ in range(100):
        budget.add(5, 1.0)
    assert budget.allowance() == pytest.approx(6.0 + 2.025), "what was won long ago cannot all be lost again"
    before = budget.allowance()
    assert budget.allowance(n_peers=3) == pytest.approx(before - 1.5), "four share what one alone may lose"


def test_gains_of_shadow_drafts_are_lent_and_their_losses_cost_nothing() -> None:
    budget = RegretBudget()
    budget.add(1, 3.0)
    before = budget.allowance()
    budget.add_shadow(1, 2.0)
    assert budget.allowance() == before, "no time was lost"
    budget.add_shadow(3, 1.5)
    assert budget.allowance() == pytest.approx(before + 0.5), "the winnings beyond the losses"
    for _ in range(5):
        budget.add_shadow(1, 5.0)
    budget.add_shadow(4, 1.0)
    assert budget.allowance() == pytest.approx(before + 1.5), (
        "losses of two steps have to be made good, however many there were"
    )
    for _ in range(5):
        budget.add_shadow(9, 1.0)
    assert budget.allowance() == pytest.approx(2.0 + 0.03), "no more is lent than the initial allowance"
    budget.add(3, 1.0)
    assert budget.allowance() == pytest.approx(2.0 + 0.04), "what is won pays back"
    budget.add(3, 1.0)
    assert budget.allowance() == pytest.approx(4.0 + 0.05)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("round"), st.floats(0, 1), st.integers(1, 12)),
            st.tuples(st.just("shadow"), st.floats(0, 1), st.integers(1, 12)),
        ),
        max_size=300,
    )
)
@example([("shadow", 0.0, 12), ("round", 1.0, 1), ("round", 1.0, 1), ("round", 0.0, 4)] * 60)
def test_no_more_is_lost_than_is_allowed(events: list[tuple[str, float, int]]) -> None:
    """For any drafts: a round may cost one plain step and the allowance, and emits a token at least."""
    budget, emitted, steps = RegretBudget(), 0, 0.0
    for kind, share, tokens in events:
        took = 1.0 + share * max(0.0, budget.allowance())
        if kind == "shadow":
            budget.add_shadow(tokens, took)
            continue
        budget.add(tokens, took)
        emitted, steps = emitted + tokens, steps + took
        assert steps - emitted <= 4.0 + 0.01 * steps + 1e-6


def test_statistics_outlive_the_process() -> None:
    draft_stats = DraftStats(Profile({1: 0.1, 4: 0.2}, 0.01, 0.001))
    for right in itertools.islice(itertools.cycle((True, False, True)), 50):
        draft_stats.lookup("greedy").observe(4, right)
        draft_stats.model("greedy").acceptance.observe(0.7, right)
        draft_stats.model("greedy").gain(0).observe(1.0)
    state = json.loads(json.dumps(draft_stats.to_dict()))
    again = DraftStats.from_dict(state)
    assert again.to_dict() == draft_stats.to_dict()
    ours, theirs = again.model("greedy").fork(), draft_stats.model("greedy").fork()
    assert ours.gain(0).value == pytest.approx(theirs.gain(0).value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("rows"),
        lambda s: s["rows"].pop("1"),
        lambda s: s["rows"].update({"x": 1.0}),
        lambda s: s["rows"].update({"1": -1.0}),
        lambda s: s.update(rows=[]),
        lambda s: s.update(draft_s="x"),
        lambda s: s["matches"]["greedy"].pop(),
        lambda s: s["matches"].update(greedy=None),
        lambda s: s["matches"]["greedy"].__setitem__(0, [float("nan"), 1.0]),
        lambda s: s["matches"]["greedy"].__setitem__(0, [2.0, 1.0]),
        lambda s: s["models"]["greedy"].__setitem__(0, [-1.0, 1.0]),
        lambda s: s["models"].update(greedy=[["a", "b"]] * 13),
    ],
)
def test_damaged_statistics_raise(damage) -> None:  # type: ignore[no-untyped-def]
    draft_stats = DraftStats(Profile({1: 0.1}, 0.01))
    draft_stats.lookup("greedy").observe(4, True)
    draft_stats.model("greedy")
    state = json.loads(json.dumps(draft_stats.to_dict()))
    damage(state)
    with pytest.raises(ValueError):
        DraftStats.from_dict(state)
