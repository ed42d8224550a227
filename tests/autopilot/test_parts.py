"""The parts of the controller: costs, means, acceptance, sizes of drafts, regret and exploration budgets."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.decayed_mean import DecayedMean
from edgespec.autopilot.draft_size import choose_size, list_sizes
from edgespec.autopilot.marginal_cost import MarginalCost
from edgespec.autopilot.profile import DraftCost, Profile, choose_chain_length
from edgespec.autopilot.regret import RegretBudget
from edgespec.core.peers import SOLO, BatchPeers


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


def after(rate: DecayedMean) -> DecayedMean:
    """For the next text, when `rate`'s is over."""
    next_ = DecayedMean(0.6)
    next_.restore(rate.evidence)
    return next_


@given(st.lists(st.floats(0, 1), max_size=8), st.lists(st.floats(0.1, 9), min_size=9, max_size=9), st.floats(0.1, 3))
def test_the_choice_is_the_best_of_all(probabilities: list[float], seconds: list[float], recent_rate: float) -> None:
    rows = list_sizes(probabilities, lambda n: seconds[n - 1], 0.3, 8)
    best, price = choose_size(rows, recent_rate)
    sums = [1 + sum(sorted(probabilities, reverse=True)[:n]) for n in range(len(probabilities) + 1)]
    speeds = [tokens / (0.3 + seconds[n]) for n, tokens in enumerate(sums)]
    assert price == pytest.approx(max(recent_rate, *speeds, 0.0))
    if max(speeds) >= recent_rate:
        assert best.speed == pytest.approx(max(speeds))


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=20),
    st.lists(st.floats(1.0, 2.0), min_size=64, max_size=64),
    st.floats(1.0, 3.0),
    st.sampled_from([SOLO, BatchPeers(3, 5, prefilling=False)]),
)
def test_no_draft_pays_whose_first_token_is_less_probable_than_any_that_may(
    ratios: list[float], factors: list[float], tokens_per_step: float, peers: BatchPeers
) -> None:
    """Each token is `ratios` times as probable as the one before, and the first as the least rate."""
    rows = dict(enumerate(accumulate(factors, lambda seconds, factor: seconds + 0.3 * (factor - 1)), 1))
    cost = MarginalCost(CostModel(Profile(rows)), lambda: peers)
    cost.begin_round(0)
    price = tokens_per_step / cost.seconds(1)
    probabilities = list(accumulate(ratios, lambda reached, ratio: reached * ratio, initial=cost.least_rate * 0.999))
    size, _ = choose_size(list_sizes(probabilities, cost.seconds, 0.0, 63), price)
    assert size.value(price) <= list_sizes((), cost.seconds, 0.0, 0)[0].value(price) + 1e-9
    certain = list_sizes([cost.least_rate + 1e-6] * 63, cost.seconds, 0.0, 63)
    assert max(each.value(1.0 / cost.seconds(1)) for each in certain[1:]) > 0, "from it on one may pay"


def test_the_least_rate_follows_what_is_measured() -> None:
    cost = MarginalCost(CostModel(Profile({1: 1.0, 2: 1.5, 4: 1.6, 64: 40.0})))
    assert cost.least_rate == pytest.approx(0.2) and cost.steps[3] == pytest.approx(1.6)
    for _ in range(20):
        cost.model.observe(1, 0, 1.0)
        cost.model.observe(4, 0, 1.3)
    assert cost.least_rate == pytest.approx(0.1) and cost.steps[3] == pytest.approx(1.3)


def test_the_first_allowance_is_shared_with_the_peers() -> None:
    assert [RegretBudget(2.0).allowance(n_peers) for n_peers in (0, 1, 3)] == [2.0, 1.0, 0.5]


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
