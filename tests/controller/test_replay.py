"""The autopilot on recorded texts and virtual clocks: against every fixed length, plain decoding and bad drafters.

The texts and proposals are the trained pair's over prompts of eleven categories (benchmarks/traces.py), the cost curves
are measured ones (docs/benchmarks.md). `tests.controller.replays` prints what these tests assert.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec.controller.stats import DraftStats
from edgespec.drafters.draft_model import Candidates
from tests.controller.replay import (
    CURVES,
    Clock,
    ReplayStepper,
    autopilot,
    autopilot_speeds,
    count_plain_steps,
    fixed_speeds,
    make_clock,
    make_profile,
    mean,
    oracle,
    read_traces,
    replay,
)

HERE = Path(__file__).parent
GREEDY, SAMPLED = read_traces(HERE / "greedy.json.gz"), read_traces(HERE / "sampled.json.gz")


@pytest.fixture(scope="module", params=CURVES)
def named(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_greedy_text_is_faster_than_with_any_fixed_length(named: str) -> None:
    clock = make_clock(named)
    fixed = fixed_speeds(GREEDY, clock)
    ours = autopilot_speeds(GREEDY, make_clock(named, seed=0))
    assert mean(ours) >= 1.03 * max(mean(each) for each in fixed.values()), "the best length, chosen with hindsight"
    assert mean(ours) >= 0.95 * mean(oracle(fixed)), "the best length of each prompt, chosen with hindsight"
    assert ours.min() > 0.9


def test_sampled_text_is_never_slower_than_plain(named: str) -> None:
    """At temperature 0.8 a greedy draft of this pair is right too seldom to pay on most of the curves."""
    clock = make_clock(named, seed=0)
    ours = autopilot_speeds(SAMPLED, clock)
    fixed = fixed_speeds(SAMPLED, make_clock(named))
    assert mean(ours) >= 0.98 * max(1.0, *(mean(each) for each in fixed.values()))
    assert ours.min() > 0.93


class WrongStepper(ReplayStepper):
    """A draft model that is always sure, and always wrong."""

    def start(self, tokens, window=10_000):  # type: ignore[no-untyped-def]
        return self._falsify(super().start(tokens, window), tokens)

    def step(self, token):  # type: ignore[no-untyped-def]
        return self._falsify(super().step(token), [])

    def _falsify(self, options: Candidates | None, tokens: list[int]) -> Candidates | None:
        return None if options is None else Candidates([4095 if 4095 not in tokens else 4094], [0.999])


def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(named: str) -> None:
    clock = make_clock(named, seed=0)
    with_wrong, draft_stats = [], DraftStats(make_profile(clock))
    for trace in SAMPLED:
        stepper = WrongStepper(trace)
        with_wrong.append(count_plain_steps(trace) / replay(autopilot(draft_stats, stepper), stepper, trace, clock))
    without, draft_stats = [], DraftStats(make_profile(clock))
    for trace in SAMPLED:
        stepper = ReplayStepper(trace)
        without.append(count_plain_steps(trace) / replay(autopilot(draft_stats, None), stepper, trace, clock))
    assert mean(np.array(with_wrong)) >= 0.985 * mean(np.array(without))
    assert with_wrong[0] > 0.93, "nothing is known of the drafter yet"
    assert min(with_wrong[1:]) > 0.96


def test_a_machine_that_became_slow_for_drafts() -> None:
    """The profile promises flat verification; the clock charges every row in full."""
    draft_stats = DraftStats(make_profile(make_clock("a GPU")))
    honest = Clock(lambda n: 1.0 * n, 0.3, np.random.default_rng(1))
    speeds = autopilot_speeds(SAMPLED, honest, draft_stats)
    assert mean(speeds) > 0.96 and np.median(speeds) > 0.97, "two of 96 steps are what the budget allows"


def test_one_busy_moment_does_not_end_drafting() -> None:
    """Four rows have been seen once, and took three times as long as they do."""
    clock = make_clock("1B, Q4_0")
    undisturbed, draft_stats = autopilot_speeds(GREEDY, clock), DraftStats(make_profile(clock))
    draft_stats.costs.observe(4, len(GREEDY[0].prompt), 3 * clock.curve(4))
    assert mean(autopilot_speeds(GREEDY, clock, draft_stats)) > 0.97 * mean(undisturbed)


def test_replays_are_deterministic() -> None:
    speeds = [autopilot_speeds(GREEDY[:3], make_clock("8B, Q4_0", seed=0)) for _ in range(2)]
    assert (speeds[0] == speeds[1]).all()


def test_chains_where_trees_are_not_taken() -> None:
    clock = make_clock("a GPU")
    for trace in GREEDY[:4]:
        stepper, draft_stats = ReplayStepper(trace), DraftStats(make_profile(clock))
        controller = autopilot(draft_stats, stepper, trees=False)
        propose = controller.propose

        def checked(tokens, limit, propose=propose):  # type: ignore[no-untyped-def]
            draft = propose(tokens, limit)
            assert draft.is_chain
            return draft

        controller.propose = checked  # type: ignore[method-assign]
        assert count_plain_steps(trace) / replay(controller, stepper, trace, clock) > 1.1


def test_decisions_explain_themselves() -> None:
    clock = make_clock("8B, Q4_0")
    decisions = set()
    for trace in GREEDY:
        stepper, draft_stats = ReplayStepper(trace), DraftStats(make_profile(clock))
        controller = autopilot(draft_stats, stepper)
        record = controller.record

        def heard(step, record=record):  # type: ignore[no-untyped-def]
            assert step.decision.expected_tokens >= 1.0 and step.decision.expected_s > 0
            decisions.add((step.decision.source, step.decision.reason, step.n_drafted > 0))
            record(step)

        controller.record = heard  # type: ignore[method-assign]
        replay(controller, stepper, trace, clock)
    sources = {source for source, _, drafted in decisions if drafted}
    assert sources == {"ngram", "model", "model+ngram"}
    assert ("none", "to measure plain decoding", False) in decisions
