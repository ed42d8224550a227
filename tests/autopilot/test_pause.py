"""Pauses of the autopilot's decisions, on virtual clocks and with a time of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.stats import DraftStats
from edgespec.core.drafter import Outcome
from edgespec.core.protocols import NO_DRAFT, Round, Step
from edgespec.drafters.ngram import NgramDrafter
from tests.autopilot.replay import (
    NO_SCORES,
    VOCABULARY,
    Clock,
    ReplayDrafter,
    Trace,
    count_plain_steps,
    make_clock,
    make_profile,
    mean,
    read_traces,
    replay,
)

HERE = Path(__file__).parent
GREEDY, SAMPLED = read_traces(HERE / "greedy.json.gz"), read_traces(HERE / "sampled.json.gz")
PAUSED = "drafts gain less than deciding takes"


class Hearing(NgramDrafter):
    """Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.emitted: list[int] = []
        self.n_outcomes = 0

    def observe(self, done: Round) -> Sequence[Outcome]:
        self.emitted += done.emitted
        outcomes = super().observe(done)
        self.n_outcomes += len(outcomes)
        return outcomes


class Slow(Adaptive):
    """Takes `deciding_s` for a decision, and a hundredth of it for a round that goes by."""

    deciding_s = 0.0
    own_s = 0.0  # so far

    def record(self, step: Step) -> None:
        reason = self.decision.reason
        own_s = self.deciding_s * (0.01 if reason == PAUSED else 1.0)
        self.own_s += own_s
        REASONS[reason] += 1
        super().record(replace(step, draft_s=step.draft_s + own_s))


REASONS: Counter[str] = Counter()


def run(traces: list[Trace], clock: Clock, deciding_s: float, *, has_model: bool = True) -> np.ndarray:
    """[texts] times plain decoding, the controller's own time included."""
    REASONS.clear()
    draft_stats, speeds = DraftStats(make_profile(clock)), []
    for trace in traces:
        model = ReplayDrafter(trace)
        drafters = [NgramDrafter(), model] if has_model else [NgramDrafter()]
        controller = Slow(drafters, draft_stats, "greedy", VOCABULARY, takes_trees=lambda: True)
        controller.deciding_s = deciding_s
        speeds.append(count_plain_steps(trace) / (replay(controller, [model], trace, clock) + controller.own_s))
    return np.array(speeds)


def test_where_deciding_takes_a_third_of_a_step_texts_without_gains_lose_little() -> None:
    clock = make_clock("1B, Q8_0", seed=0)  # where drafts pay least
    speeds = run(SAMPLED, clock, 0.3)
    assert mean(speeds) > 0.93
    assert REASONS[PAUSED] > 0.7 * REASONS.total()


def test_where_drafts_gain_nothing_decisions_take_half_a_percent() -> None:
    draft_stats = DraftStats(make_profile(make_clock("1B, Q8_0")))
    for n in range(2):  # the first texts measure the time of a decision
        clock, own_s, seconds = make_clock("1B, Q8_0", seed=n), 0.0, 0.0
        for trace in SAMPLED:
            controller = Slow([NgramDrafter()], draft_stats, "greedy", VOCABULARY, takes_trees=lambda: True)
            controller.deciding_s = 0.02
            seconds += replay(controller, [], trace, clock)
            own_s += controller.own_s
    assert own_s < 0.006 * seconds


def test_drafts_that_gain_less_than_deciding_takes_are_left_out() -> None:
    """Rows are nearly free there, so that drafts gain a little in most rounds."""
    for seed in range(3):
        speeds = run(SAMPLED, make_clock("a GPU", seed=seed), 0.6)
        assert mean(speeds) > 0.94 and speeds.min() > 0.92
    assert REASONS["a lookup is expected to pay"]


def test_where_deciding_takes_a_tenth_of_a_step_repetition_is_found() -> None:
    clock = make_clock("8B, Q4_0", seed=0)
    slow, quick = (mean(run(GREEDY, clock, deciding_s, has_model=False)) for deciding_s in (0.1, 0.0))
    assert slow > 0.8 * quick and slow > 1.4
    assert REASONS["a lookup is expected to pay"]


def test_a_decision_that_takes_next_to_nothing_is_made_in_every_round() -> None:
    clock = make_clock("8B, Q4_0", seed=0)
    assert run(GREEDY, clock, 0.003).min() > 0.9
    assert not REASONS[PAUSED]


def test_lookups_hear_of_every_token_that_went_by() -> None:
    """Of rounds that went by together with a later one; what is missing at the end is what went by at last."""
    clock, trace = make_clock("1B, Q8_0", seed=0), SAMPLED[1]
    draft_stats = DraftStats(make_profile(clock))
    run(SAMPLED[:1], clock, 0.3)
    for deciding_s in (0.0, 0.3):
        lookup, model = Hearing(), ReplayDrafter(trace)
        for each in SAMPLED[:1], [trace]:  # the first text measures the own time
            lookup.emitted, lookup.n_outcomes = [], 0
            controller = Slow([lookup], draft_stats, "greedy", VOCABULARY, takes_trees=lambda: True)
            controller.deciding_s = deciding_s
            replay(controller, [], each[0], clock)
        heard = trace.text[1 : 1 + len(lookup.emitted)]
        assert lookup.emitted == heard and len(trace.text) - 1 - len(heard) <= 64
        naive = NgramDrafter()
        naive.begin(trace.prompt, None)
        text = [*trace.prompt, *trace.text[: 1 + len(heard)]]
        assert lookup.n_outcomes == len(naive.observe(Round(text, (), NO_DRAFT, (), 0, NO_SCORES)))
    assert REASONS[PAUSED] and model.drafted == 0


def test_a_draft_model_that_pays_is_asked_where_steps_are_short() -> None:
    clock, drafted = make_clock("8B, Q4_0", seed=0), []
    draft_stats = DraftStats(make_profile(clock))
    for trace in GREEDY * 2:
        model = ReplayDrafter(trace)
        controller = Slow([NgramDrafter(), model], draft_stats, "greedy", VOCABULARY, takes_trees=lambda: True)
        controller.deciding_s = 0.02
        replay(controller, [model], trace, clock)
        drafted.append(model.drafted)
    assert all(drafted)
