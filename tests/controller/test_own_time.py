"""The controller's own time on virtual clocks: charged, and spent rarely where plain steps are short."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.controller.adaptive import Adaptive, QuickLookups
from edgespec.controller.cost_model import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.own_time import OwnTime, Pace, PassedRounds
from edgespec.controller.stats import DraftStats, TextStats
from edgespec.core.drafter import Drafter, Outcome
from edgespec.core.protocols import NO_DRAFT, Budget, Round, Step
from edgespec.core.tree import DraftTree
from edgespec.drafters.ngram import NgramDrafter
from tests.controller.replay import (
    NO_SCORES,
    VOCABULARY,
    Clock,
    Curve,
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
PASSING = "steps are short: drafts are sought rarely"
LOOKING = {
    "no draft is expected to pay",
    "a wrong draft would cost more than may be lost",
    "to measure plain decoding",
}


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
    assert slow > 0.85 * quick and slow > 1.5
    assert REASONS["a lookup is expected to pay"]


def test_a_decision_that_takes_next_to_nothing_is_made_in_every_round() -> None:
    clock = make_clock("8B, Q4_0", seed=0)
    assert run(GREEDY, clock, 0.003).min() > 0.9
    assert not REASONS[PASSING]


class Timed(Adaptive):
    """A decision takes `deciding_s`, other rounds next to nothing."""

    deciding_s = 0.0
    n_decisions = 0

    def record(self, step: Step) -> None:
        if not self._short.is_passing and self._round is not None and self._round.kind == "decide":
            self.n_decisions += 1
            step = replace(step, draft_s=step.draft_s + self.deciding_s)
        super().record(step)


def count_decisions(traces: Sequence[Trace], draft_stats: DraftStats, deciding_s: float) -> list[int]:
    """[texts] decisions of lookups on a clock whose plain step is a second."""
    clock, counts = make_clock("8B, Q4_0", seed=0), []
    for trace in traces:
        controller = Timed([NgramDrafter()], draft_stats, "greedy", VOCABULARY, trees=True)
        controller.deciding_s = deciding_s
        replay(controller, [], trace, clock)
        counts.append(controller.n_decisions)
    return counts


@pytest.mark.parametrize("is_stored", [False, True])
def test_decisions_are_measured_again_after_a_busy_moment(is_stored: bool) -> None:
    draft_stats = DraftStats(make_profile(make_clock("8B, Q4_0")))
    assert count_decisions(SAMPLED[:2], draft_stats, 0.05)[1] == 0
    assert not draft_stats.own_time.is_negligible(1.0)
    if is_stored:
        draft_stats = DraftStats.from_dict(json.loads(json.dumps(draft_stats.to_dict())))
    counts = count_decisions(SAMPLED, draft_stats, 0.002)
    assert draft_stats.own_time.is_negligible(1.0)
    assert counts[0] == 0 and counts[-1] > 50


def test_decisions_that_take_long_are_rarely_measured_again() -> None:
    draft_stats = DraftStats(make_profile(make_clock("8B, Q4_0")))
    traces = SAMPLED * 4
    counts = count_decisions(traces, draft_stats, 0.05)
    seconds = sum(len(trace.text) for trace in traces)
    assert 8 <= counts[0] <= 12, "unknown at first"
    assert 0.0004 * seconds < 0.05 * sum(counts[1:]) < 0.0013 * seconds
    assert not draft_stats.own_time.is_negligible(1.0)


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


def count_rounds(pace: Pace) -> list[bool]:
    """Of each round that goes by, whether lookups are asked."""
    asked = []
    while pace.is_resting:
        asked.append(not pace.is_blind)
        pace.pass_round()
    return asked


def test_nobody_is_asked_for_more_rounds_while_drafts_are_not_allowed() -> None:
    own_time = OwnTime()
    own_time.add("look", 0.15)
    pace, blind = Pace(own_time), []
    for _ in range(6):
        pace.rest_blind(1.0)
        asked = count_rounds(pace)
        assert len(asked) == 100
        blind.append(asked.index(True))
    assert blind == [1, 3, 7, 15, 31, 63]
    pace.gain()
    pace.rest_blind(1.0)
    assert count_rounds(pace).index(True) == 1


def test_lookups_are_asked_in_every_third_of_the_rounds_that_go_by() -> None:
    own_time = OwnTime()
    own_time.add("look", 0.012)
    pace = Pace(own_time)
    pace.rest(1.0)
    assert count_rounds(pace) == [True, False, False, True, False, False, True, False]
    pace.rest(1e6)
    assert not pace.is_resting, "recording takes next to nothing of such a step"


def test_a_busy_moment_counts_twice_the_usual_time() -> None:
    own_time = OwnTime()
    charged = [own_time.add("quick", 2e-5) for _ in range(20)]
    assert charged[0] == 0.0 and np.allclose(charged[1:], 2e-5)
    assert np.isclose(own_time.add("quick", 1.0), 4e-5)
    assert np.isclose(own_time.quick_s(0), 2.1e-5)
    assert own_time.add_switch(5.0, 1e-3) == 1e-3 and own_time.add_switch(-1.0, 1e-3) == 0.0
    assert own_time.quick_s(0) > 5e-5


def test_long_chains_do_not_make_short_ones_dear() -> None:
    own_time = OwnTime()
    for _ in range(20):
        own_time.add("quick", 2e-4, 63)
    assert own_time.quick_s(63) == pytest.approx(2e-4) and own_time.quick_s(3) < 7e-5


def test_decisions_count_once_some_were_measured() -> None:
    own_time = OwnTime()
    for n in range(8):
        assert own_time.is_negligible(1e-4), n
        assert own_time.add("decide", 1e-5) == 0.0, "those of a cold process are not charged"
    assert own_time.add("decide", 1e-5) == 1e-5
    assert own_time.is_negligible(1e-3) and not own_time.is_negligible(1e-4)


def test_decisions_count_as_unknown_once_they_were_not_measured_for_long() -> None:
    own_time = OwnTime()
    for _ in range(9):
        own_time.add("decide", 1e-3)
    own_time.wait(7.9)
    own_time.begin_text()
    assert not own_time.is_negligible(1e-3), "eight of them would take more than a thousandth of the time"
    own_time.wait(0.2)
    own_time.begin_text()
    for _ in range(8):
        assert own_time.is_negligible(1e-3)
        assert own_time.add("decide", 1e-3) == pytest.approx(1e-3), "charged like others"
    assert not own_time.is_negligible(1e-3)
    own_time.begin_text()
    assert not own_time.is_negligible(1e-3)


class Sure(Drafter):
    """Promises `token` with a confidence of its own, or cannot say."""

    is_free = True

    def __init__(self, name: str, confidence: float | None, tokens: Sequence[int] = (7, 8, 9)) -> None:
        self.name = name
        self.promised = confidence
        self.tokens = tokens

    def predict_confidence(self, text: Sequence[int]) -> float | None:
        return self.promised

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        tokens = self.tokens[: limit.depth]
        tree.add_chain(tokens, self.name, [self.promised or 0.5] * len(tokens))
        yield


def quick(drafters: Sequence[Drafter], curve: Curve) -> QuickLookups:
    draft_stats = DraftStats(make_profile(Clock(curve, 0.1)))
    stats = TextStats(draft_stats, "greedy")
    return QuickLookups(MarginalCost(draft_stats.costs), stats, DrafterSet(drafters, VOCABULARY))


def test_the_lookup_that_promises_most_drafts_the_length_of_most_tokens_per_second() -> None:
    lookups = quick([Sure("low", 0.4), Sure("high", 0.85), Sure("none", 0.0)], lambda rows: 1.0 + 0.2 * (rows - 1))
    chain = lookups.choose([1])
    assert chain is not None and chain.drafter.name == "high"
    rate = 0.85
    speeds = [sum(rate**i for i in range(n + 1)) / (1.0 + 0.2 * n) for n in range(16)]
    assert chain.size.nodes == int(np.argmax(speeds)) > 1
    assert chain.size.speed == pytest.approx(max(speeds))
    assert lookups.draft(chain, [1], 2) == [7, 8]
    assert lookups.draft(chain, [1], 9) == [7, 8, 9], "it knows no more"
    assert not lookups.is_unsure


def test_no_lookup_drafts_where_rows_cost_too_much() -> None:
    assert quick([Sure("high", 0.85)], lambda rows: float(rows)).choose([1]) is None
    unsure = quick([Sure("unsure", None)], lambda rows: 1.0 + 0.1 * rows)
    assert unsure.choose([1]) is None and unsure.is_unsure


def test_a_draft_model_that_pays_is_asked_where_steps_are_short() -> None:
    clock, drafted = make_clock("8B, Q4_0", seed=0), []
    draft_stats = DraftStats(make_profile(clock))
    for trace in GREEDY * 2:
        model = ReplayDrafter(trace)
        controller = Slow([NgramDrafter(), model], draft_stats, "greedy", VOCABULARY, trees=True)
        controller.deciding_s = 0.02
        replay(controller, [model], trace, clock)
        drafted.append(model.drafted)
    assert all(drafted) and not draft_stats.own_time.is_negligible(1.0)


def test_rounds_that_go_by_are_counted_and_those_alone_are_measured() -> None:
    passed = PassedRounds()
    for own_s, forward_s in ((1e-5, 1.0), (2e-5, None), (3e-5, 3.0), (0.0, 9.0)):
        passed.add(own_s, forward_s)
    n, own_s, median_s = passed.take()
    assert (n, median_s) == (4, 3.0) and own_s == pytest.approx(6e-5)
    assert passed.take() == (0, 0.0, None)
