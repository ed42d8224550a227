"""What a plain round takes: the mean of those that were measured, as the profile scales it with the context."""

from __future__ import annotations

import pytest

from edgespec.controller.cost_model import DraftCost, Profile
from edgespec.engine.plain_rounds import PlainRounds

PROFILE = Profile({1: 0.1, 2: 0.12}, longer={1024: Profile({1: 0.2, 2: 0.22})})


def test_nothing_is_said_before_three_measurements() -> None:
    rounds = PlainRounds()
    for seconds in (0.3, 0.1):
        rounds.add(0, 5, seconds)
        assert rounds.estimate(0, 5) is None
    rounds.add(0, 5, 0.2)
    assert rounds.estimate(0, 5) == pytest.approx(0.2, rel=0.01), "later ones count a little more"
    assert rounds.estimate(0, 5000) == rounds.estimate(0, 5), "without a profile all positions are equal"
    assert rounds.estimate(1, 5) is None, "with peers a round is another"


def test_later_positions_take_longer() -> None:
    rounds = PlainRounds()
    rounds.expect(PROFILE)
    for _ in range(3):
        rounds.add(0, 0, 0.11)
        rounds.add(1, 1024, 0.44)
    assert rounds.estimate(0, 0) == pytest.approx(0.11)
    assert rounds.estimate(0, 1024) == pytest.approx(0.22)
    assert rounds.estimate(1, 0) == pytest.approx(0.24)


def test_measurements_by_another_profile_are_forgotten() -> None:
    rounds = PlainRounds()
    rounds.expect(PROFILE)
    for _ in range(3):
        rounds.add(0, 0, 0.11)
    rounds.expect(Profile(PROFILE.rows, {"model": DraftCost({1: 0.01})}, PROFILE.longer))
    assert rounds.estimate(0, 0) == pytest.approx(0.11), "a drafter was added"
    rounds.expect(Profile({1: 0.2}))
    assert rounds.estimate(0, 0) is None
