"""The speed over plain decoding that is said of an answer, against rounds whose true cost is known."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.metrics import SpeedupEstimate
from edgespec.core.protocols import Step

CURVE = {1: 1.0, 2: 1.8, 4: 3.3, 8: 4.1}  # plain steps by rows, as on a CPU
PLAIN_S = 0.01


def make_answer(
    seed: int, *, bias: float, share: float, load: float, drafted: float, sizes: tuple[int, ...] = (2, 4, 8)
) -> tuple[list[Step], float]:
    """The steps of an answer, and its true speed over plain decoding.

    bias     of the measured curve, as a factor
    share    of a plain step, that each decision takes
    load     how many times slower the machine is in its spells
    drafted  the share of rounds that have a draft
    sizes    their rows
    """
    rng = random.Random(seed)
    at_s, slow = 1.0, 1.0
    steps = [Step(0, (0,), 0, 0, 0, at_s)]
    tokens, plain = 0, 0.0
    for index in range(1, 400):
        if rng.random() < 0.03:
            slow = load if slow == 1.0 else 1.0
        rows = rng.choice(sizes) if rng.random() < drafted else 1
        accepted = sum(rng.random() < 0.6 for _ in range(rows - 1))
        own = share * (1.0 if rows == 1 else 3.0)
        draft_s = PLAIN_S * slow * own
        at_s += PLAIN_S * slow * CURVE[rows] * rng.uniform(0.95, 1.05) + draft_s
        known = CURVE[rows] * (bias if rows > 1 else 1.0)
        steps.append(Step(index, (0,) * (accepted + 1), rows - 1, accepted, accepted, at_s, draft_s, plain_steps=known))
        tokens += accepted + 1
        plain += CURVE[rows] + own
    return steps, tokens / plain


def estimate(steps: list[Step]) -> float | None:
    speedup = SpeedupEstimate()
    for step in steps:
        speedup.add(step)
    return speedup.speedup


def find_bound(steps: list[Step]) -> float:
    """tau times the share of the time that is not drafting."""
    emitted, drafting_s = sum(len(each.tokens) for each in steps[1:]), sum(each.draft_s for each in steps)
    return emitted / (len(steps) - 1) * (1 - drafting_s / (steps[-1].at_s - steps[0].at_s))


@given(
    seed=st.integers(0, 10_000),
    bias=st.floats(0.7, 1.4),
    share=st.floats(0.0, 0.3),
    load=st.floats(1.0, 5.0),
    drafted=st.floats(0.0, 0.8),
)
def test_near_the_truth_and_never_beyond_the_bound(
    seed: int, bias: float, share: float, load: float, drafted: float
) -> None:
    """With a curve that is wrong by up to 40%, on a machine that is up to five times slower for a while."""
    steps, truth = make_answer(seed, bias=bias, share=share, load=load, drafted=drafted)
    said = estimate(steps)
    assert said == pytest.approx(truth, rel=0.1 if load > 1.05 else 0.05)
    assert said is not None and said <= find_bound(steps) * (1 + 1e-9)


@given(seed=st.integers(0, 10_000), load=st.floats(1.0, 20.0), share=st.floats(0.0, 0.5))
def test_plain_rounds_are_plain_decoding_less_the_share_of_drafting(seed: int, load: float, share: float) -> None:
    steps, _ = make_answer(seed, bias=1.0, share=share, load=load, drafted=0.0)
    assert estimate(steps) == pytest.approx(1 / (1 + share), rel=0.01)


@given(st.data())
def test_no_gap_between_rounds_raises_it_beyond_the_bound(data: st.DataObject) -> None:
    """Whatever interrupts the rounds: a busy machine, a screen that is drawn, a computer that sleeps."""
    steps, _ = make_answer(7, bias=data.draw(st.floats(0.1, 3.0)), share=0.1, load=2.0, drafted=0.5)
    stops = data.draw(st.dictionaries(st.integers(1, len(steps) - 1), st.floats(0.0, 100.0), max_size=20))
    steps = list(_interrupt(steps, stops))
    said = estimate(steps)
    assert said is not None and 0 <= said <= find_bound(steps) * (1 + 1e-9)


def _interrupt(steps: list[Step], stops: dict[int, float]) -> Iterator[Step]:
    late_s = 0.0
    for index, step in enumerate(steps):
        late_s += stops.get(index, 0.0)
        yield replace(step, at_s=step.at_s + late_s)


def test_nothing_is_said_while_it_is_not_known() -> None:
    steps, _ = make_answer(3, bias=1.0, share=0.0, load=1.0, drafted=1.0)
    unknown = [replace(each, plain_steps=None) for each in steps]
    assert estimate(steps[:1]) is None
    assert estimate(unknown) is None, "no curve and no plain round"


def test_plain_rounds_stand_in_for_a_curve_that_was_not_measured() -> None:
    """As with a fixed length, under which no costs are measured on load."""
    steps, truth = make_answer(3, bias=1.0, share=0.1, load=3.0, drafted=0.5, sizes=(4,))
    assert estimate([replace(each, plain_steps=None) for each in steps]) == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize(("n_plain", "n_drafted", "said"), [(3, 3, 1.0), (2, 3, None), (3, 2, None)])
def test_three_plain_rounds_and_three_drafted_ones_stand_in_for_a_curve(
    n_plain: int, n_drafted: int, said: float | None
) -> None:
    """A draft's round emits two tokens in twice the time."""
    plain, drafted = (0, 1, 10_000, 0, 1.0), (1, 2, 20_000, 0, None)
    assert estimate(make_steps([plain] * n_plain + [drafted] * n_drafted)) == (said and pytest.approx(said))


@dataclass(frozen=True)
class Recorded:
    """A real answer, as `benchmarks.said_speedup --record` keeps it: its rounds and its measured speedup."""

    measured: float
    steps: list[Step]

    @property
    def has_drafts(self) -> bool:
        return any(step.n_drafted for step in self.steps)


def read_recorded() -> list[Recorded]:
    path = Path(__file__).with_name("recorded_rounds.json")
    return [Recorded(each["measured"], make_steps(each["rounds"])) for each in json.loads(path.read_text("utf-8"))]


def make_steps(rounds: list[tuple[int, int, int, int, float | None]]) -> list[Step]:
    """Rounds are drafted and emitted tokens, microseconds, those of drafting, and plain steps of the forward."""
    steps, at_s = [Step(0, (0,), 0, 0, 0, 0.0)], 0.0
    for drafted, emitted, spent_us, drafting_us, plain_steps in rounds:
        at_s += spent_us / 1e6
        accepted = emitted - 1
        draft_s = drafting_us / 1e6
        step = Step(len(steps), (0,) * emitted, drafted, accepted, accepted, at_s, draft_s)
        steps.append(replace(step, plain_steps=plain_steps))
    return steps


RECORDED = read_recorded()


def test_recorded_answers_are_stated_as_measured() -> None:
    """As near as the measurement is: the same without a draft, where the truth is known, strays by more than 5%."""
    errors = {each.measured / (estimate(each.steps) or 0.0) - 1: each.has_drafts for each in RECORDED}
    noise = max(abs(error) for error, has_drafts in errors.items() if not has_drafts)
    assert noise > 0.1, "a single answer cannot show 5%"
    assert abs(median(errors)) <= 0.05
    assert median(map(abs, errors)) <= 0.1


def test_a_recorded_answer_without_a_draft_is_plain_decoding_less_the_share_of_drafting() -> None:
    plain = [each.steps for each in RECORDED if not each.has_drafts]
    assert plain
    for steps in plain:
        assert estimate(steps) == pytest.approx(find_bound(steps)) and find_bound(steps) <= 1
