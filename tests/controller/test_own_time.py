"""The controller's own time on virtual clocks: charged, and spent rarely where plain steps are short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgespec.controller.adaptive import Adaptive
from edgespec.controller.own_time import OwnTime, Pace
from edgespec.controller.stats import DraftStats
from edgespec.core.drafter import Outcome
from edgespec.core.protocols import NO_DRAFT, Round, Step
from edgespec.drafters.ngram import NgramDrafter
from tests.controller.replay import (
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
PASSING = "looking for a draft costs more than it gains here"
LOOKING = {"no draft is expected to pay", "deciding costs more than it gains here", "to measure plain decoding"}


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
    """Takes seconds itself: a decision `deciding_s`, a look a tenth of that, a round that goes by a hundredth."""

    deciding_s = 0.0
    own_s = 0.0  # so far

    def record(self, step: Step) -> None:
        reason = self.decision.reason
        own_s = self.deciding_s * (0.01 if reason == PASSING else 0.1 if reason in LOOKING else 1.0)
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
        controller = Slow(drafters, draft_stats, "greedy", VOCABULARY, trees=True)
        controller.deciding_s = deciding_s
        speeds.append(count_plain_steps(trace) / (replay(controller, [model], trace, clock) + controller.own_s))
    return np.array(speeds)


def test_where_deciding_takes_a_third_of_a_step_texts_without_gains_lose_little() -> None:
    clock = make_clock("1B, Q8_0", seed=0)  # where drafts pay least
    speeds = run(SAMPLED, clock, 0.3)
    assert mean(speeds) > 0.97 and np.quantile(speeds, 0.1) > 0.95
    assert REASONS[PASSING] > 0.7 * REASONS.total()


def test_where_deciding_takes_a_tenth_of_a_step_repetition_is_found() -> None:
    clock = make_clock("8B, Q4_0", seed=0)
    slow, quick = (mean(run(GREEDY, clock, deciding_s, has_model=False)) for deciding_s in (0.1, 0.0))
    assert slow > 0.9 * quick and slow > 1.5
    assert REASONS["a lookup is expected to pay"]


def test_a_decision_that_takes_next_to_nothing_is_made_in_every_round() -> None:
    clock = make_clock("8B, Q4_0", seed=0)
    assert run(GREEDY, clock, 0.003).min() > 0.9
    assert not REASONS[PASSING] and not REASONS["deciding costs more than it gains here"]


def test_lookups_hear_of_every_token_that_went_by() -> None:
    """Of rounds that went by together with a later one; what is missing at the end is what went by at last."""
    clock, trace = make_clock("1B, Q8_0", seed=0), SAMPLED[1]
    draft_stats = DraftStats(make_profile(clock))
    run(SAMPLED[:1], clock, 0.3)
    for deciding_s in (0.0, 0.3):
        lookup, model = Hearing(), ReplayDrafter(trace)
        for each in SAMPLED[:1], [trace]:  # the first text measures the own time
            lookup.emitted, lookup.n_outcomes = [], 0
            controller = Slow([lookup], draft_stats, "greedy", VOCABULARY, trees=True)
            controller.deciding_s = deciding_s
            replay(controller, [], each[0], clock)
        heard = trace.text[1 : 1 + len(lookup.emitted)]
        assert lookup.emitted == heard and len(trace.text) - 1 - len(heard) <= 64
        naive = NgramDrafter()
        naive.begin(trace.prompt, None)
        text = [*trace.prompt, *trace.text[: 1 + len(heard)]]
        assert lookup.n_outcomes == len(naive.observe(Round(text, (), NO_DRAFT, (), 0, NO_SCORES)))
    assert REASONS[PASSING] and model.drafted == 0


def test_more_rounds_go_by_blind_while_decisions_are_in_vain() -> None:
    own_time = OwnTime()
    own_time.add("look", 1.0)
    pace, blind = Pace(own_time), []
    for _ in range(5):
        pace.rest_blind(10.0, 0)
        blind.append(0)
        while pace.begin_round(lambda: True):
            blind[-1] += 1
    assert blind == [1, 3, 7, 15, 16]
    pace.gain()
    pace.rest_blind(10.0, 0)
    assert [pace.begin_round(lambda: True) for _ in range(2)] == [True, False]


def test_a_glance_ends_a_rest() -> None:
    own_time = OwnTime()
    own_time.add("look", 1.0)
    pace = Pace(own_time)
    pace.rest(10.0)
    assert [pace.begin_round(lambda: False) for _ in range(3)] == [True] * 3
    assert not pace.begin_round(lambda: True) and not pace.is_resting
    pace.rest(1e6)
    assert not pace.is_resting, "a look takes next to nothing of such a step"


def test_a_busy_moment_counts_twice_the_usual_time() -> None:
    own_time = OwnTime()
    assert [own_time.add_passed(1e-5) for _ in range(3)] == [0.0, 0.0, 0.0]
    charged = [own_time.add("look", 2e-5) for _ in range(20)]
    assert charged[0] == 0.0 and np.allclose(charged[1:], 1e-5)
    assert np.isclose(own_time.add("look", 1.0), 2e-5)
    own_time.add("decide", 11e-5)
    assert np.isclose(own_time.deciding_s, 9e-5, rtol=0.05)
    assert own_time.is_negligible(0.01) and not own_time.is_negligible(0.001)


def test_a_debt_outlasts_the_text() -> None:
    own_time = OwnTime()
    own_time.settle(0, 0.9)
    assert own_time.rounds_in_debt == 0
    own_time.settle(10, 0.5)  # 0.3 plain steps above what is free
    assert own_time.rounds_in_debt == 30
    pace = Pace(own_time)  # of another text
    pace.begin_text()
    assert [pace.begin_round(lambda: True) for _ in range(31)] == [True] * 30 + [False]
    own_time.settle(30, 0.0)
    assert own_time.rounds_in_debt == 0
    own_time.settle(1, -5.0)  # a draft has gained
    own_time.settle(0, 1.0)
    assert own_time.rounds_in_debt == 0, "gains pay back the debt, and no more"
    own_time.settle(0, 50.0)
    assert own_time.rounds_in_debt == 200, "the debt is limited"


def test_a_draft_model_that_pays_is_asked_in_debt() -> None:
    clock = make_clock("8B, Q4_0", seed=0)
    draft_stats = DraftStats(make_profile(clock))
    drafted = []
    for n, trace in enumerate(GREEDY[:6]):
        if n == 3:
            draft_stats.own_time.settle(0, 3.0)
        model = ReplayDrafter(trace)
        controller = Adaptive([NgramDrafter(), model], draft_stats, "greedy", VOCABULARY, trees=True)
        replay(controller, [model], trace, clock)
        drafted.append(model.drafted)
    assert all(drafted[2:])
