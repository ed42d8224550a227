"""Warnings about a bad draft model, statistics by phase, and shadow drafts."""

from __future__ import annotations

from edgespec.controller.shadow import ShadowDraft
from edgespec.controller.stats import DraftStats, ModelStats
from tests.controller.replay import ReplayStepper, autopilot, make_profile, replay
from tests.controller.test_replay import GREEDY, SAMPLED, WrongStepper, make_clock


def test_a_hopeless_draft_model_is_reported() -> None:
    clock = make_clock("a GPU")
    draft_stats = DraftStats(make_profile(clock))
    warnings = []
    for trace in SAMPLED:
        stepper = WrongStepper(trace)
        controller = autopilot(draft_stats, stepper)
        replay(controller, stepper, trace, clock)
        warnings.append(controller.warning())
    assert any(text and "may not belong to this model" in text for text in warnings)
    stepper = ReplayStepper(GREEDY[0])
    controller = autopilot(DraftStats(make_profile(clock)), stepper)
    replay(controller, stepper, GREEDY[0], clock)
    assert controller.warning() is None


def test_a_draft_model_that_has_become_worse_is_reported() -> None:
    record = ModelStats()
    for _ in range(8):
        for _ in range(30):
            record.first_choice.observe(1.0)
        assert record.warning() is None
        record = record.fork()
    for at in range(60):
        record.first_choice.observe(float(at % 4 == 0))
    warning = record.warning()
    assert warning is not None and "in earlier texts" in warning


def test_reasoning_and_answer_are_learned_apart() -> None:
    draft_stats = DraftStats(make_profile(make_clock("a GPU")))
    controller = autopilot(draft_stats, None)
    controller.begin([1, 2, 3, 1, 2], None)  # type: ignore[arg-type]
    before = draft_stats.lookup("greedy, answer").rate(2)
    controller.set_phase("reasoning")
    controller._lookup.extend([1, 2, 3, 1, 2])
    from edgespec.core.protocols import Budget

    controller.propose([1, 2, 3, 1, 2, 9], Budget(8, 8))
    controller.end()
    assert draft_stats.lookup("greedy, answer").rate(2) == before
    assert draft_stats.lookup("greedy, reasoning").rate(2) < before, "2 after 1 was foretold to be followed by 3"


def test_shadow_drafts_are_compared_with_the_text() -> None:
    shadow = ShadowDraft()
    assert shadow.resolve([1, 2]) is None
    shadow.remember(2, [5, 6, 7])
    assert shadow.is_pending
    assert shadow.resolve([1, 2]) is None, "nothing of it is there yet"
    assert shadow.resolve([1, 2, 5, 6]) is None, "right so far"
    assert shadow.resolve([1, 2, 5, 6, 9]) == (3, 4)
    assert not shadow.is_pending
    shadow.remember(2, [5])
    assert shadow.resolve([1, 2, 5]) == (2, 2)
