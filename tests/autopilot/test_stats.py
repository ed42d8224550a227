"""Statistics of drafters: by name, way of sampling and phase; kept between texts and in a file."""

from __future__ import annotations

import itertools
import json

import pytest

from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DecisionTime, DraftStats, TextStats
from edgespec.core.drafter import Confidence, Drafter

PROFILE = Profile(
    {1: 0.1, 4: 0.2},
    {"model": DraftCost({1: 0.01}, 0.001), "pard": DraftCost({1: 0.01, 8: 0.03})},
    {2048: Profile({1: 0.2, 16: 0.9}, {"model": DraftCost({1: 0.02}, 0.001)})},
)


class Named(Drafter):
    def __init__(self, name: str, confidence: Confidence = "probability", *, is_free: bool = False) -> None:
        self.name = name
        self.confidence = confidence
        self.is_free = is_free


NGRAM, MODEL, PARD = Named("ngram", "length", is_free=True), Named("model"), Named("pard")


def learned() -> DraftStats:
    draft_stats = DraftStats(PROFILE)
    stats = TextStats(draft_stats, "greedy")
    for drafter in (NGRAM, MODEL, PARD):
        stats.drafter(drafter)
    for right in itertools.islice(itertools.cycle((True, False, True)), 50):
        stats.drafter(NGRAM).acceptance.observe(4, right)
        stats.drafter(MODEL).acceptance.observe(0.7, right)
        stats.drafter(MODEL).first_choice.observe(float(right))
        stats.drafter(MODEL).gain(0).observe(1.0)
        stats.drafter(MODEL).gain(5).observe(-1.0)
    draft_stats.decision_time.observe(3e-4)
    stats.merge()
    return draft_stats


def test_statistics_outlive_the_process() -> None:
    draft_stats = learned()
    state = json.loads(json.dumps(draft_stats.to_dict()))
    again = DraftStats.from_dict(state)
    assert again.to_dict() == draft_stats.to_dict()
    assert again.costs.profile == PROFILE
    assert again.decision_time.seconds == 3e-4
    assert draft_stats.drafters.keys() == {f"{name}; greedy, answer" for name in ("ngram", "model", "pard")}
    ours, theirs = TextStats(again, "greedy"), TextStats(draft_stats, "greedy")
    untrained = TextStats(DraftStats(PROFILE), "greedy")
    for value in (
        lambda stats: stats.drafter(NGRAM).acceptance.rate(4),
        lambda stats: stats.drafter(MODEL).first_choice.value,
        lambda stats: stats.drafter(MODEL).gain(0).value,
        lambda stats: stats.drafter(MODEL).gain(5).value,
    ):
        assert value(ours) == pytest.approx(value(theirs))  # type: ignore[no-untyped-call]
        assert value(ours) != pytest.approx(value(untrained), abs=0.01)  # type: ignore[no-untyped-call]


def test_the_time_of_a_decision_is_the_median_of_recent_ones() -> None:
    """The first ones are slow, and the machine may be busy; few of them decide nothing."""
    draft_stats, untouched = DraftStats(PROFILE), DecisionTime(5e-4)
    for seconds in (30e-4, 3e-4, 4e-4, 90e-4, 4e-4, 4e-4):
        draft_stats.decision_time.observe(seconds)
    assert draft_stats.decision_time.seconds == 4e-4
    for _ in range(8):
        draft_stats.decision_time.observe(8e-4)
    assert draft_stats.decision_time.seconds == 8e-4, "it follows the machine up as well as down"
    untouched.observe(4e-4)
    assert untouched.seconds == 4e-4


def test_the_record_of_a_drafter_is_that_of_all_its_answers() -> None:
    draft_stats = DraftStats(PROFILE)
    for sampling, n_right in (("greedy", 9), ("sampled", 3), ("sampled", 3)):
        stats = TextStats(draft_stats, sampling)
        for phase in ("answer", "reasoning"):
            stats.set_phase(phase)
            for at in range(10):
                stats.drafter(MODEL).observe_choice(at < n_right)
        stats.drafter(PARD)
        stats.merge()
    assert draft_stats.records.keys() == {"model"}, "the other was not asked"
    record = draft_stats.records["model"]
    assert (record.answers, record.accepted, record.tested) == (3, 30, 60)
    assert record.recent == pytest.approx(0.9 * 0.64 + 0.3 * 0.36) and not record.is_low(0.5)
    assert DraftStats.from_dict(json.loads(json.dumps(draft_stats.to_dict()))).records == draft_stats.records
    for _ in range(40):
        assert not record.is_low(0.5) or record.answers >= 20
        record = record.add(4, 10)
    assert record.is_low(0.5) and not record.is_low(0.3) and record.recent == pytest.approx(0.4, abs=1e-3)
    assert not AcceptanceRecord(2, 0, 19).is_low(0.5) and not AcceptanceRecord(2, 1, 20).is_low(0.5), (
        "too little says nothing"
    )
    assert AcceptanceRecord(2, 0, 20).is_low(0.5), "hardly any"
    assert record.describe("tiny") == "drafts of tiny are accepted 41% of the time over 43 answers"


def test_only_the_first_drafter_that_takes_time_is_trusted() -> None:
    draft_stats = DraftStats(PROFILE)
    stats = TextStats(draft_stats, "greedy")
    for drafter in (NGRAM, MODEL, PARD):
        stats.drafter(drafter)
    assert [stats.drafter(each).gain(0).value > 0 for each in (MODEL, PARD)] == [True, False]
    again = DraftStats.from_dict(json.loads(json.dumps(draft_stats.to_dict())))
    other = TextStats(again, "greedy")
    assert [other.drafter(each).gain(0).value > 0 for each in (PARD, MODEL)] == [False, True], "as it was first seen"
    fresh = TextStats(again, "sampled")
    assert [fresh.drafter(each).gain(0).value > 0 for each in (PARD, MODEL)] == [True, False], "by way of sampling"


def test_gains_are_kept_by_the_number_of_generations() -> None:
    stats = DraftStats(PROFILE).drafter("pard; greedy, answer", "probability")
    for _ in range(30):
        stats.gain(3).observe(-2.0)
    assert stats.gain(0).value == pytest.approx(0.2), "alone"
    assert stats.gain(2).value < -1.0 and stats.gain(8).value == 0.0


def test_another_kind_of_confidence_starts_anew() -> None:
    """A package may change its drafter."""
    draft_stats = learned()
    before = draft_stats.drafter("model; greedy, answer", "probability")
    after = draft_stats.drafter("model; greedy, answer", "length")
    assert after is not before and after.confidence == "length"
    assert after.first_choice.evidence == (0.0, 0.0)
    assert draft_stats.drafter("model; greedy, answer", "length") is after


def test_concurrent_texts_are_merged_one_after_the_other() -> None:
    draft_stats = DraftStats(PROFILE)
    one, two = TextStats(draft_stats, "greedy"), TextStats(draft_stats, "greedy")
    for _ in range(40):
        one.drafter(MODEL).first_choice.observe(1.0)
        two.drafter(MODEL).first_choice.observe(0.0)
    assert one.drafter(MODEL).first_choice.value > 0.85 and two.drafter(MODEL).first_choice.value < 0.2
    one.merge()
    two.merge()
    assert 0.4 < TextStats(draft_stats, "greedy").drafter(MODEL).first_choice.value < 0.6
