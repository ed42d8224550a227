"""The parts of the controller: costs, means, acceptance, sizes of drafts, regret and exploration budgets."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.controller.acceptance import AcceptanceModel, DecayedMean, make_acceptance_model
from edgespec.controller.cost_model import CostModel, DraftCost, Profile, choose_chain_length
from edgespec.controller.gate import RegretBudget, choose_allowed_loss
from edgespec.controller.round import DraftSize, choose_size, list_counts, list_sizes
from edgespec.controller.stats import ExplorationBudget


def test_costs_between_the_profiles_points() -> None:
    costs = CostModel(Profile({1: 10.0, 4: 16.0, 8: 40.0}))
    assert [costs.seconds(rows) for rows in (1, 2, 4, 6, 8, 10)] == pytest.approx([10, 12, 16, 28, 40, 10 + 30 / 7 * 9])
    assert CostModel(Profile({1: 10.0})).seconds(3) == 30.0
    assert CostModel(Profile({1: 10.0, 4: 12.0, 5: 4.0})).seconds(9) == 5.0, "a falling end does not fall for ever"
    for rows in ({2: 1.0}, {1: 0.0}, {1: 1.0, 2: math.inf}, {1: math.nan}):
        with pytest.raises(ValueError, match="one row"):
            Profile(rows)


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


def test_costs_without_a_longer_context_are_learned_by_band() -> None:
    costs = CostModel(Profile({1: 10.0, 2: 15.0}))
    for _ in range(15):
        costs.observe(1, 100, 12.0)
    costs.move_to(400)
    assert (costs.count_recent(1), costs.seconds(1)) == (15, 12.0)
    costs.move_to(4000)
    assert (costs.count_recent(1), costs.seconds(1)) == (0, 12.0), "as in the nearest band"
    for _ in range(15):
        costs.observe(1, 4000, 30.0)
    assert (costs.count_recent(1), costs.seconds(1)) == (15, 30.0)
    assert costs.seconds(2) == pytest.approx(45.0)
    costs.move_to(9000)
    assert costs.seconds(1) == 30.0, "nearer than the first"
    costs.move_to(0)
    assert costs.seconds(1) == 12.0, "the first band keeps its own"


def test_draft_and_reading_costs() -> None:
    costs = CostModel(Profile({1: 10.0}, {"model": DraftCost({1: 2.0}, 0.5), "pard": DraftCost({1: 2.0, 4: 5.0}, 0.1)}))
    assert (costs.unit_s("model"), costs.read_s("model")) == (2.0, 0.5)
    assert [costs.unit_s("pard", n) for n in (1, 2, 3, 4, 9)] == [2.0, 3.0, 4.0, 5.0, 5.0], "none is extrapolated"
    costs.observe_drafting("model", 40.0, 4.0)
    assert costs.unit_s("model") == pytest.approx(3.0), "one slow unit counts for at most twice the expected time"
    for _ in range(15):
        costs.observe_drafting("model", 8.0, 4.0)
    assert (costs.unit_s("model"), costs.read_s("model")) == (4.0, 1.0), "reading is slower where drafting is"
    costs.observe_drafting("model", 900.0, 4.0)
    assert costs.unit_s("model") == 4.0, "an outlier is one among fifteen"
    assert (costs.unit_s("pard", 4), costs.read_s("pard")) == (5.0, 0.1), "each drafter has its own"


def test_a_drafter_of_which_some_units_take_no_time_costs_their_mean() -> None:
    costs = CostModel(Profile({1: 10.0}, {"remote": DraftCost({1: 4.0, 8: 6.0}, varies=True)}))
    for seconds in (0.0, 0.0, 4.0) * 5:
        costs.observe_drafting("remote", seconds, 4.0)
    assert costs.unit_s("remote") == pytest.approx(4.0 / 3) and costs.unit_s("remote", 8) == pytest.approx(2.0)


def test_the_costs_of_a_drafter_may_be_added() -> None:
    costs = CostModel(Profile({1: 10.0}, {"model": DraftCost({1: 2.0})}))
    assert costs.has_cost("model") and not costs.has_cost("pard")
    costs.add_drafters({"pard": DraftCost({1: 1.0, 8: 3.0}, 0.1)})
    assert costs.has_cost("model") and costs.unit_s("pard", 8) == 3.0
    assert costs.profile == Profile({1: 10.0}, {"model": DraftCost({1: 2.0}), "pard": DraftCost({1: 1.0, 8: 3.0}, 0.1)})


def test_the_cost_of_a_path() -> None:
    assert DraftCost({1: 2.0}).path_s(3) == 6.0, "a unit for each token"
    assert DraftCost({1: 2.0, 4: 5.0}).path_s(3) == 4.0, "one block"
    units = ({}, {1: 0.0}, {0: 1.0}, {1: -1.0}, {1: math.nan}, {1: 1.0, 2: math.inf})
    for each in units:
        with pytest.raises(ValueError, match="time of a unit"):
            DraftCost(each)
    for read_s in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="negative"):
            DraftCost({1: 1.0}, read_s)


def test_the_fastest_chain() -> None:
    rows = {1: 1.0, 2: 1.1, 3: 1.2, 5: 1.3}
    length, speedup = choose_chain_length(rows, 0.05, 0.8)
    assert (length, speedup) == (4, pytest.approx((1 + 0.8 + 0.64 + 0.512 + 0.4096) / 1.5))
    assert choose_chain_length(rows, 0.05, 0.05) == (0, 1.0)
    assert choose_chain_length({1: 1.0}, 0.05, 0.8) == (0, 1.0), "nothing is known of more rows"


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
    acceptance = make_acceptance_model("probability")
    for _ in range(100):
        acceptance.observe(0.99, is_right=False)
    assert acceptance.rate(0.99) < 0.2, "a drafter that is always sure and always wrong"
    assert acceptance.rate(0.3) == pytest.approx(0.27)
    lengths = make_acceptance_model("length")
    assert [lengths.rate(n) for n in (2, 3, 40)] == pytest.approx([0.4, 0.5, 0.95])
    with pytest.raises(ValueError, match="one rate"):
        AcceptanceModel([0.5], [DecayedMean(0.1)])


def test_sizes_up_to_sixteen_rows_and_some_beyond_are_compared() -> None:
    assert list_counts(0) == [0] and list_counts(15) == [*range(16)]
    assert list_counts(21) == [*range(16), 19, 21] and list_counts(63) == [*range(16), 19, 23, 27, 31, 39, 47, 55, 63]


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
    budget = RegretBudget(2.0)
    assert budget.allowance() == pytest.approx(2.0)
    budget.add(1, 2.5)
    assert budget.allowance() == pytest.approx(2.0 - 1.5 + 0.025)
    for _ in range(100):
        budget.add(1, 1.0)
    assert budget.allowance() == pytest.approx(0.5 + 1.025), "a hundredth of the time"
    for _ in range(100):
        budget.add(5, 1.0)
    assert budget.allowance() == pytest.approx(34.0 + 2.025), "what was won long ago cannot all be lost again"
    before = budget.allowance()
    assert budget.allowance(n_peers=3) == pytest.approx(before - 1.5), "four share what one alone may lose"


def test_a_text_may_lose_one_draft_of_usual_size() -> None:
    flat, steep, jagged = {}, {}, {4: 3.5, 8: 2.6}
    for rows in range(2, 17):
        flat[rows], steep[rows] = 1 + 0.1 * rows, float(rows)
        jagged.setdefault(rows, 4.0)
    for curve, allowed in (flat, 1.0), (steep, 2.0), (jagged, 1.6):
        assert choose_allowed_loss(
            lambda rows, curve=curve: 0.03 * (curve[rows] if rows > 1 else 1.0)
        ) == pytest.approx(allowed)


def test_gains_of_shadow_drafts_are_lent_and_their_losses_cost_nothing() -> None:
    budget = RegretBudget(2.0)
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
    budget.add_shadow(3, 2.75)
    assert budget.allowance() == pytest.approx(before + 1.75)
    budget.add_shadow(9, 1.0)
    assert budget.allowance() == pytest.approx(before + 2.75), "an eighth of the winnings, beyond the initial allowance"
    for _ in range(5):
        budget.add_shadow(9, 1.0)
    assert budget.allowance() == pytest.approx(4.0 + 0.03), "no more than as if nothing were lost"
    budget.add(3, 1.0)
    assert budget.allowance() == pytest.approx(4.0 + 0.04), "what is won pays back"
    budget.add(5, 1.0)
    assert budget.allowance() == pytest.approx(4.0 + 0.05 + 2.0)


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
    budget, emitted, steps, missed = RegretBudget(2.0), 0, 0.0, 0.0
    for kind, share, tokens in events:
        took = 1.0 + share * max(0.0, budget.allowance())
        if kind == "shadow":
            budget.add_shadow(tokens, took)
            missed += max(tokens - took, 0.0)
            continue
        budget.add(tokens, took)
        emitted, steps = emitted + tokens, steps + took
        assert steps - emitted <= 4.0 + 0.01 * steps + missed / 8 + 1e-6


def test_the_exploration_budget() -> None:
    budget = ExplorationBudget()
    assert not budget.spend(4.5), "four plain steps at first"
    assert budget.spend(4.0) and not budget.spend(0.01)
    budget = ExplorationBudget()
    assert budget.spend(0.5), "of which one step is kept after a cheap trial"
    assert not budget.spend(0.6) and budget.spend(0.5)
    budget.add(100.0)
    assert budget.spend(0.3) and not budget.spend(0.01), "then a small share of the time"
    budget.add(1000.0)
    budget.charge(2.5)
    assert budget.spend(0.5) and not budget.spend(0.01), "less what was lost"
    budget.add(1000.0)
    budget.reset()
    assert not budget.spend(0.01)
    budget.charge(1.0)
    budget.reset()
    budget.add(100.0)
    assert not budget.spend(0.01), "a debt is kept"
