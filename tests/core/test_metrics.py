"""Metrics against counts made by hand and by brute force."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.metrics import Meter, Metrics, ReadingClock
from edgespec.core.protocols import PrefillProgress, Step


def measure(steps: list[Step], prompt_tokens: int = 5, started_s: float = 10.0) -> Metrics:
    meter = Meter(prompt_tokens, started_s)
    for step in steps:
        meter.add(step)
    return meter.metrics()


def test_by_hand() -> None:
    metrics = measure(
        [
            Step(0, (7,), 0, 0, 0, at_s=12.0, sample_s=0.5),
            Step(1, (1, 2, 3), 4, 2, 3, at_s=13.0, draft_s=0.1, verify_s=0.6, sample_s=0.2, commit_s=0.05),
            Step(2, (4,), 4, 0, 1, at_s=14.0, draft_s=0.1, verify_s=0.6, sample_s=0.2, commit_s=0.05),
            Step(3, (5, 6, 7, 8, 9), 4, 4, 4, at_s=17.0, draft_s=0.1, verify_s=0.6, sample_s=0.2, commit_s=0.05),
        ]
    )
    assert (metrics.prompt_tokens, metrics.emitted_tokens, metrics.target_forwards) == (5, 10, 3)
    assert (metrics.drafted_tokens, metrics.accepted_tokens) == (12, 6)
    assert metrics.tau == 3.0
    assert metrics.acceptance_rate == 0.5
    assert metrics.alpha_by_depth == (2 / 3, 1.0, 0.5, 1.0)
    assert (metrics.ttft_s, metrics.prefill_s) == (2.0, 1.5)
    assert metrics.tpot_s == pytest.approx(5 / 9)
    assert metrics.tokens_per_second == pytest.approx(9 / 5)
    assert metrics.step_p50_s == 1.0
    assert metrics.step_p99_s == pytest.approx(2.96)
    assert metrics.draft_s == pytest.approx(0.3)
    assert metrics.verify_s == pytest.approx(1.8)
    assert metrics.sample_s == pytest.approx(1.1)
    assert metrics.commit_s == pytest.approx(0.15)


def test_cached_and_reasoning_tokens() -> None:
    meter = Meter(5, 10.0)
    meter.add_progress(PrefillProgress(5, 5, 3), at_s=11.5)
    assert meter.metrics().prefill_s == 1.5
    meter.add(Step(0, (7,), 0, 0, 0, at_s=12.0), reasoning=1)
    meter.add(Step(1, (1, 2, 3), 4, 2, 3, at_s=13.0), reasoning=2)
    metrics = meter.metrics()
    assert (metrics.cached_tokens, metrics.reasoning_tokens) == (3, 3)


def test_parts_of_a_prompt_that_end_at_one_moment_have_no_speed() -> None:
    clock = ReadingClock(10.0)
    speeds = [
        clock.add(PrefillProgress(done, 30, 0), at_s).speed for done, at_s in ((10, 11.0), (20, 11.0), (30, 12.0))
    ]
    assert speeds == [None, None, 20.0]


def test_nothing_yet() -> None:
    metrics = measure([])
    assert (metrics.prompt_tokens, metrics.emitted_tokens, metrics.target_forwards) == (5, 0, 0)
    unknown = (
        metrics.tau,
        metrics.acceptance_rate,
        metrics.tokens_per_second,
        metrics.ttft_s,
        metrics.tpot_s,
        metrics.step_p50_s,
        metrics.step_p99_s,
    )
    assert unknown == (None,) * 7
    assert metrics.alpha_by_depth == ()
    assert metrics.prefill_s == 0


@st.composite
def generations(draw: st.DrawFn) -> list[Step]:
    steps = [Step(0, (0,), 0, 0, 0, at_s=10.5)]
    for index in range(1, draw(st.integers(1, 12))):
        drafted = draw(st.integers(0, 6))
        accepted = draw(st.integers(0, drafted))
        tested = accepted + (drafted > accepted and draw(st.booleans()))
        at_s = steps[-1].at_s + draw(st.integers(1, 64)) / 64
        steps.append(Step(index, (1,) * (accepted + 1), drafted, accepted, tested, at_s))
    return steps


@given(generations())
def test_by_brute_force(steps: list[Step]) -> None:
    metrics = measure(steps)
    decode = steps[1:]
    assert metrics.emitted_tokens == 1 + sum(s.n_accepted + 1 for s in decode)
    assert metrics.target_forwards == len(decode)
    if decode:
        assert metrics.tau == pytest.approx(1 + metrics.accepted_tokens / len(decode))
        assert metrics.tokens_per_second == pytest.approx(
            (metrics.emitted_tokens - 1) / (steps[-1].at_s - steps[0].at_s)
        )
    outcomes: dict[int, list[bool]] = {}
    for s in decode:
        for depth in range(s.n_tested):
            outcomes.setdefault(depth, []).append(depth < s.n_accepted)
    assert metrics.alpha_by_depth == tuple(sum(outcomes[d]) / len(outcomes[d]) for d in range(len(outcomes)))
    assert json.loads(json.dumps(asdict(metrics)))["alpha_by_depth"] == list(metrics.alpha_by_depth)


def test_plain_decoding_is_what_this_answer_would_have_taken() -> None:
    """Beside a screen that is drawn, plain decoding is slower too than it was when the model was loaded."""
    meter = Meter(3, 10.0)
    assert (meter.plain_tokens_per_second, meter.speedup) == (None, None)
    for step in (
        Step(0, (7,), 0, 0, 0, at_s=11.0),
        Step(1, (1, 2, 3), 4, 2, 3, at_s=12.0, plain_steps=2.0),
        Step(2, (4,), 0, 0, 0, at_s=14.0, plain_steps=1.0),
    ):
        meter.add(step)
    assert meter.plain_tokens_per_second == pytest.approx(4 / 3 / (4 / 3))
    assert meter.speedup is None, "too few tokens to judge by"
    assert [meter.recent_speed(end) for end in (None, 2, 1, 0)] == [pytest.approx(4 / 3), 3.0, None, None]


@pytest.mark.parametrize(("n_drafted", "n_steps", "told"), [(4, 11, 1.5), (4, 10, None), (0, 40, None)])
def test_a_speedup_needs_drafts_and_tokens(n_drafted: int, n_steps: int, told: float | None) -> None:
    meter = Meter(3, 10.0)
    meter.add(Step(0, (7,), 0, 0, 0, at_s=11.0))
    for i in range(1, n_steps + 1):
        tokens = (1, 2, 3) if n_drafted else (1,)
        meter.add(Step(i, tokens, n_drafted, len(tokens) - 1, len(tokens) - 1, at_s=11.0 + i, plain_steps=2.0))
    assert meter.speedup == meter.metrics().speedup == (None if told is None else pytest.approx(told))
