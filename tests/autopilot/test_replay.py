"""The autopilot on recorded texts and virtual clocks: against every fixed length, plain decoding and bad drafters.

The texts and proposals are the trained pair's over prompts of eleven categories (benchmarks/traces.py), the cost curves
are measured ones (docs/benchmarks.md). `tests.autopilot.replays` prints what these tests assert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from edgespec.autopilot.stats import DraftStats
from edgespec.core.protocols import Budget, Draft, Step
from tests.autopilot.replay import (
    CURVES,
    Candidates,
    Clock,
    ReplayDrafter,
    Trace,
    adaptive,
    adaptive_speeds,
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
    ours = adaptive_speeds(GREEDY, make_clock(named, seed=0))
    assert mean(ours) >= 1.03 * max(mean(each) for each in fixed.values()), "the best length, chosen with hindsight"
    assert mean(ours) >= 0.95 * mean(oracle(fixed)), "the best length of each prompt, chosen with hindsight"
    assert ours.min() > 0.9


def test_no_sampled_text_loses_more_than_four_percent_to_plain_and_all_together_two(named: str) -> None:
    """At temperature 0.8 a greedy draft of this pair is right too seldom to pay on most of the curves."""
    clock = make_clock(named, seed=0)
    ours = adaptive_speeds(SAMPLED, clock)
    fixed = fixed_speeds(SAMPLED, make_clock(named))
    assert mean(ours) >= 0.98 * max(1.0, *(mean(each) for each in fixed.values()))
    assert ours.min() > 0.96


class WrongDrafter(ReplayDrafter):
    """A draft model that is always sure, and always wrong: the texts have no `token`."""

    def __init__(self, trace: Trace, name: str = "model", token: int = 4095) -> None:
        super().__init__(trace, name)
        self._token = token

    def change(self, candidates: Candidates, text: Sequence[int]) -> Candidates:
        return Candidates([self._token], [0.999])


def replay_with(traces: list[Trace], clock: Clock, names: Sequence[str]) -> tuple[np.ndarray, float]:
    """([texts] times plain decoding, drafting per plain step), with statistics that the texts share.

    Drafters named 'wrong...' are useless, each with a wrong token of its own.
    """
    draft_stats, speeds, drafting_s = DraftStats(make_profile(clock, names)), [], 0.0
    for trace in traces:
        drafters = [
            WrongDrafter(trace, name, 4095 - i) if name.startswith("wrong") else ReplayDrafter(trace, name)
            for i, name in enumerate(names)
        ]
        speeds.append(count_plain_steps(trace) / replay(adaptive(draft_stats, drafters), drafters, trace, clock))
        drafting_s += sum(each.drafted for each in drafters) * clock.draft_s
    return np.array(speeds), drafting_s / sum(map(count_plain_steps, traces))


def speeds_with(traces: list[Trace], clock: Clock, names: Sequence[str]) -> np.ndarray:
    return replay_with(traces, clock, names)[0]


def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(named: str) -> None:
    with_wrong = speeds_with(SAMPLED, make_clock(named, seed=0), ["wrong"])
    without = speeds_with(SAMPLED, make_clock(named, seed=0), [])
    assert mean(with_wrong) >= 0.985 * mean(without)
    assert with_wrong[0] > 0.93, "nothing is known of the drafter yet"
    assert min(with_wrong[1:]) > 0.96


@pytest.mark.parametrize("traces", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_ten_useless_drafters_lose_no_more_than_one(traces: list[Trace]) -> None:
    """Each has its own name and its own wrong token; the noise of the clock is an independent one for each seed."""
    ratios = []
    for curve, seed in product(CURVES, range(2)):
        one, _ = replay_with(traces, make_clock(curve, seed=seed), ["wrong"])
        ten, drafting = replay_with(traces, make_clock(curve, seed=seed), [f"wrong {i}" for i in range(10)])
        assert ten.min() > 0.9, (curve, seed)
        assert drafting < 0.02, "plain steps for each token, reading of the text included"
        ratios.append(mean(ten) / mean(one))
    assert mean(np.array(ratios)) >= 0.985


def test_a_good_drafter_after_a_useless_one_is_adopted() -> None:
    """Only the first of several is trusted before it was asked; the second earns its place in trials.

    On the curve where the draft model wins most: on the others it wins no more than the trials cost.
    """
    both, model, wrong = (
        mean(np.array([mean(speeds_with(GREEDY, make_clock("a GPU", seed=seed), names)) for seed in range(3)]))
        for names in (["wrong", "model"], ["model"], ["wrong"])
    )
    assert both >= 0.98 * model
    assert both >= 1.05 * wrong


def test_a_machine_that_became_slow_for_drafts() -> None:
    """The profile promises flat verification; the clock charges every row in full."""
    draft_stats = DraftStats(make_profile(make_clock("a GPU")))
    honest = Clock(lambda n: 1.0 * n, 0.3, np.random.default_rng(1))
    speeds = adaptive_speeds(SAMPLED, honest, draft_stats)
    assert mean(speeds) > 0.96 and np.median(speeds) > 0.97, "two of 96 steps are what the budget allows"


def test_one_busy_moment_does_not_end_drafting() -> None:
    """Four rows have been seen once, and took three times as long as they do."""
    clock = make_clock("1B, Q4_0")
    undisturbed, draft_stats = adaptive_speeds(GREEDY, clock), DraftStats(make_profile(clock))
    draft_stats.costs.observe(4, len(GREEDY[0].prompt), 3 * clock.curve(4))
    assert mean(adaptive_speeds(GREEDY, clock, draft_stats)) > 0.97 * mean(undisturbed)


def test_chains_where_trees_are_not_taken() -> None:
    clock = make_clock("a GPU")
    for trace in GREEDY[:4]:
        model, draft_stats = ReplayDrafter(trace), DraftStats(make_profile(clock))
        controller = adaptive(draft_stats, [model], trees=False)
        propose = controller.propose

        def checked(tokens: Sequence[int], limit: Budget, propose=propose) -> Draft:  # type: ignore[no-untyped-def]
            draft: Draft = propose(tokens, limit)
            assert draft.is_chain
            return draft

        controller.propose = checked  # type: ignore[method-assign]
        assert count_plain_steps(trace) / replay(controller, [model], trace, clock) > 1.1


def test_decisions_explain_themselves() -> None:
    clock = make_clock("8B, Q4_0")
    decisions = set()
    for trace in GREEDY:
        model, draft_stats = ReplayDrafter(trace), DraftStats(make_profile(clock))
        controller = adaptive(draft_stats, [model])
        record = controller.record

        def heard(step: Step, record=record) -> None:  # type: ignore[no-untyped-def]
            decision = step.decision
            assert decision is not None and decision.expected_tokens is not None and decision.expected_s is not None
            assert decision.expected_tokens >= 1.0 and decision.expected_s > 0
            assert decision.drafted.keys() <= {"model"}, "only drafters that take time"
            decisions.add((decision.drafter, decision.reason, step.n_drafted > 0, bool(decision.drafted)))
            record(step)

        controller.record = heard  # type: ignore[method-assign]
        replay(controller, [model], trace, clock)
    sources = {"+".join(sorted(source.split("+"))) for source, _, is_drafted, _ in decisions if is_drafted}
    assert sources == {"ngram", "model", "model+ngram"}
    assert ("none", "to measure plain decoding", False, False) in decisions
    assert {"model" in source or asked for source, _, is_drafted, asked in decisions if is_drafted} == {True, False}
    assert not [source for source, _, _, asked in decisions if "model" in source and not asked]
