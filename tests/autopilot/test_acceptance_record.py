"""The record of a bad draft model, statistics by phase, and shadow drafts."""

from __future__ import annotations

from edgespec.autopilot.stats import DraftStats
from edgespec.core.protocols import NO_DRAFT, Budget, Round
from tests.autopilot.replay import NO_SCORES, ReplayDrafter, adaptive, make_profile, replay
from tests.autopilot.test_replay import GREEDY, SAMPLED, WrongDrafter, make_clock


def test_a_hopeless_draft_model_is_reported() -> None:
    clock = make_clock("a GPU")
    draft_stats = DraftStats(make_profile(clock))
    found = []
    # A useless drafter is seldom asked, so that its evidence takes some texts.
    for trace in [*SAMPLED, *GREEDY] * 5:
        model = WrongDrafter(trace)
        replay(adaptive(draft_stats, [model]), [model], trace, clock)
        found.append(draft_stats.records["model"].is_low(0.5))
    assert not found[0], "a few wrong tokens say little"
    assert found[-1]
    good, draft_stats = ReplayDrafter(GREEDY[0]), DraftStats(make_profile(clock))
    replay(adaptive(draft_stats, [good]), [good], GREEDY[0], clock)
    assert not draft_stats.records["model"].is_low(0.5)


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
