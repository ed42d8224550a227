"""What the autopilot says of a draft model that does badly, and that passages are kept apart."""

from __future__ import annotations

from edgespec.controller.shadow import ShadowDraft
from edgespec.controller.stats import DraftStats, ModelStats
from tests.controller.replay import ReplayWalk, autopilot, profile_of, replay
from tests.controller.test_replay import GREEDY, SAMPLED, Liar, clock_of


def test_a_hopeless_draft_model_is_reported() -> None:
    clock = clock_of("a GPU")
    draft_stats = DraftStats(profile_of(clock))
    said = []
    for trace in SAMPLED:
        stepper = Liar(trace)
        controller = autopilot(draft_stats, stepper)
        replay(controller, stepper, trace, clock)
        said.append(controller.warning())
    assert any(text and "may not belong to this model" in text for text in said)
    stepper = ReplayWalk(GREEDY[0])
    controller = autopilot(DraftStats(profile_of(clock)), stepper)
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
    told = record.warning()
    assert told is not None and "in earlier texts" in told


def test_reasoning_and_answer_are_learned_apart() -> None:
    draft_stats = DraftStats(profile_of(clock_of("a GPU")))
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


def test_what_was_not_tried_is_judged_by_the_text() -> None:
    untried = ShadowDraft()
    assert untried.resolve([1, 2]) is None
    untried.remember(2, [5, 6, 7])
    assert untried.is_pending
    assert untried.resolve([1, 2]) is None, "nothing of it is there yet"
    assert untried.resolve([1, 2, 5, 6]) is None, "right so far"
    assert untried.resolve([1, 2, 5, 6, 9]) == (3, 4)
    assert not untried.is_pending
    untried.remember(2, [5])
    assert untried.resolve([1, 2, 5]) == (2, 2)
