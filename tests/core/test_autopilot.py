"""The controller on simulated clocks: as fast as the best fixed length, never slower than plain, cliffs and drift."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgespec.core.acceptance import Acceptance
from edgespec.core.autopilot import Autopilot
from edgespec.core.control import FixedBudget
from edgespec.core.cost import CostCurve
from edgespec.core.protocols import Budget, Controller, Step

DEEPEST = 8
# Seconds by rows, in units of one plain step; the shapes are measured ones (docs/benchmarks.md, llama.cpp and MLX).
CURVES: dict[str, tuple[Sequence[float], float]] = {
    "flat": ([1, 1.06, 1.12, 1.2, 1.4, 1.6, 1.9, 2.15, 2.4], 0.06),
    "tiles of four": ([1, 1.7, 2.27, 1.27, 1.91, 2.58, 2.6, 2.47, 3.0], 0.05),
    "linear": ([1 + 0.79 * i for i in range(9)], 0.06),
    "step after five": ([1, 1.06, 1.10, 1.14, 1.18, 1.95, 2.0, 2.05, 2.1], 0.06),
    "an expensive draft": ([1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8], 0.7),
}


def simulate(
    controller: Controller,
    curve: Sequence[float],
    draft_s: float,
    rates: Callable[[int], float],
    tokens: int,
    seed: int,
) -> float:
    """Tokens a plain step; `rates(position)` is the acceptance of a drafted token there. Times are noisy."""
    rng = np.random.default_rng(seed)
    done, clock, index = 0, 0.0, 0
    while done < tokens:
        depth = controller.budget().depth
        accepted = 0
        while accepted < depth and rng.random() < rates(done + accepted):
            accepted += 1
        noise = float(rng.lognormal(0, 0.05)) * (3.0 if rng.random() < 0.02 else 1.0)  # now and then a busy machine
        verify, draft = curve[depth] * noise, depth * draft_s
        index += 1
        clock += curve[depth] + draft  # the noise is the clock's, not the controller's doing
        tested = accepted + (accepted < depth)
        controller.record(Step(index, (0,) * (accepted + 1), depth, accepted, tested, clock, draft, verify))
        done += accepted + 1
    return done / clock


def autopilot(curve: Sequence[float], draft_s: float) -> Autopilot:
    return Autopilot(CostCurve(dict(enumerate(curve, 1))), draft_s, DEEPEST)


def fixed(depth: int) -> FixedBudget:
    return FixedBudget(Budget(depth, depth))


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("name", CURVES)
def test_as_fast_as_the_best_fixed_length(name: str, rate: float) -> None:
    curve, draft_s = CURVES[name]
    speed = np.mean([simulate(autopilot(curve, draft_s), curve, draft_s, lambda _: rate, 3000, s) for s in range(3)])
    expected = [
        (1 + sum(rate**j for j in range(1, k + 1))) / (curve[k] + k * draft_s) for k in range(DEEPEST + 1)
    ]  # plain decoding included
    assert speed > 0.96 * max(expected)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("tokens", [32, 128, 1000])
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(name: str, tokens: int) -> None:
    curve, draft_s = CURVES[name]
    speeds = [simulate(autopilot(curve, draft_s), curve, draft_s, lambda _: 0.0, tokens, seed) for seed in range(5)]
    lost = tokens / np.array(speeds) - tokens
    deepest = curve[DEEPEST] + DEEPEST * draft_s  # what one round can lose before anything is known
    assert lost.max() <= 0.01 * tokens + 2 + deepest


def test_a_change_of_regime_is_followed() -> None:
    curve, draft_s = CURVES["flat"]

    def rates(position: int) -> float:
        return 0.9 if position // 400 % 2 else 0.15

    speed = simulate(autopilot(curve, draft_s), curve, draft_s, rates, 8000, 0)
    assert speed > 1.02 * max(simulate(fixed(k), curve, draft_s, rates, 8000, 0) for k in range(DEEPEST + 1))


def test_a_wrong_profile_is_corrected_by_the_clock() -> None:
    """The profile promises flat verification; the machine charges every row."""
    curve, draft_s = CURVES["linear"]
    pilot = Autopilot(CostCurve({1: 1.0, 8: 1.1}), draft_s, DEEPEST)
    assert simulate(pilot, curve, draft_s, lambda _: 0.5, 4000, 0) > 0.97


def test_decisions_explain_themselves() -> None:
    curve, draft_s = CURVES["tiles of four"]
    pilot = autopilot(curve, draft_s)
    simulate(pilot, curve, draft_s, lambda _: 0.8, 500, 0)
    pilot.budget()
    assert pilot.decision.depth == 3, "four rows are cheaper than two"
    assert pilot.decision.expected_rate > pilot.decision.plain_rate
    assert "tokens a second" in pilot.decision.reason


def test_acceptance_by_depth() -> None:
    acceptance = Acceptance()
    assert acceptance.rates(2) == pytest.approx([0.6, 0.6])
    for _ in range(400):
        acceptance.observe(2, 2)  # full acceptance of two: nothing about the third
    first, second, third = acceptance.rates(3)
    assert first > 0.95 and second > 0.95
    assert third == pytest.approx(second)
    for _ in range(400):
        acceptance.observe(1, 2)
    first, second, third = acceptance.rates(3)
    assert first > 0.95 and second < 0.05 and third == pytest.approx(second)


def test_the_cost_of_rows_not_seen_lately() -> None:
    costs = CostCurve({1: 10.0, 4: 16.0, 8: 40.0})
    assert [costs.seconds(rows) for rows in (1, 2, 4, 6, 8, 10)] == pytest.approx([10, 12, 16, 28, 40, 52])
    costs.observe(4, 160.0)
    assert costs.seconds(4) < 100, "one slow round is weighed against the profile"
    costs.observe(4, 15.0)
    assert costs.seconds(4) == 16.0
    for _ in range(20):
        costs.observe(1, 20.0)
    costs.observe(1, 900.0)
    assert costs.seconds(1) == 20.0, "an outlier is one among fifteen"
    assert costs.seconds(8) == pytest.approx(80.0), "the machine has become half as fast"
    for _ in range(300):
        costs.observe(2, 30.0)
    assert (costs.known(1), costs.known(2)) == (0, 15)
    assert costs.seconds(1) == 10.0, "what was measured long ago counts no more"
    with pytest.raises(ValueError, match="one row"):
        CostCurve({2: 1.0})
