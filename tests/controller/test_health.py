"""Warnings about a bad draft model, statistics by phase, and shadow drafts."""

from __future__ import annotations

from edgespec.controller.stats import DrafterStats, DraftStats
from edgespec.core.protocols import NO_DRAFT, Budget, Round
from tests.controller.replay import NO_SCORES, ReplayDrafter, adaptive, make_profile, replay
from tests.controller.test_replay import GREEDY, SAMPLED, WrongDrafter, make_clock


def test_a_hopeless_draft_model_is_reported() -> None:
    clock = make_clock("a GPU")
    draft_stats = DraftStats(make_profile(clock))
    warnings = []
    # A useless drafter is seldom asked, so that its evidence takes some texts.
    for trace in [*SAMPLED, *GREEDY] * 2:
        model = WrongDrafter(trace)
        controller = adaptive(draft_stats, [model])
        replay(controller, [model], trace, clock)
        warnings.append(controller.warning())
    assert warnings[0] is None, "a few wrong tokens say little"
    assert any(text and "drafter model: it may not belong to this model" in text for text in warnings)
    good = ReplayDrafter(GREEDY[0])
    controller = adaptive(DraftStats(make_profile(clock)), [good])
    replay(controller, [good], GREEDY[0], clock)
    assert controller.warning() is None


def test_a_draft_model_that_has_become_worse_is_reported() -> None:
    stats = DrafterStats("probability")
    for _ in range(8):
        for _ in range(30):
            stats.first_choice.observe(1.0)
        assert stats.warning("model") is None
        stats = stats.fork()
    for at in range(60):
        stats.first_choice.observe(float(at % 4 == 0))
    warning = stats.warning("model")
    assert warning is not None and "drafter model" in warning and "in earlier texts" in warning


def test_reasoning_and_answer_are_learned_apart() -> None:
    draft_stats = DraftStats(make_profile(make_clock("a GPU")))
    controller = adaptive(draft_stats, [])
    controller.begin([1, 2, 3, 1, 2])

    def rate(phase: str) -> float:
        return draft_stats.drafter(f"ngram; greedy, {phase}", "length").acceptance.rate(2)

    before = rate("answer")
    controller.set_phase("reasoning")
    controller.propose([1, 2, 3, 1, 2], Budget(8, 8))
    controller.observe(Round([1, 2, 3, 1, 2, 9], (9,), NO_DRAFT, (), 0, NO_SCORES))
    controller.end()
    assert rate("answer") == before
    assert rate("reasoning") < before, "2 after 1 was foretold to be followed by 3"
