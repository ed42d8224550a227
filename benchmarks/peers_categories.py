"""The autopilot of `benchmarks.peers` over each other arm, by category of prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from benchmarks.peers_arms import Prompt

ALL = "all"
RESAMPLES = 2000
Ratios = dict[str, dict[str, tuple[float, float, float]]]
"""By category and arm: the geometric mean over prompts, and the ends of its 95% interval."""


def compare_by_category(runs: Iterable[tuple[Prompt, str, float | None]], autopilot: str) -> Ratios:
    """Of the tokens/s of `autopilot` over those of each other arm. `runs` are (prompt, arm, tokens/s).

    "all" is over all categories alike. A prompt's ratio is that of its means over repeats.
    """
    speeds: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for prompt, arm, speed in runs:
        if speed:
            speeds[prompt.category, prompt.id][arm].append(speed)
    logs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (category, _), by_arm in speeds.items():
        for arm in by_arm.keys() - {autopilot} if autopilot in by_arm else ():
            ratio = np.log(np.mean(by_arm[autopilot]) / np.mean(by_arm[arm]))
            for name in (category, ALL):
                logs[name][arm].append(float(ratio))
    return {name: {arm: _estimate(each) for arm, each in sorted(by_arm.items())} for name, by_arm in logs.items()}


def format_ratio(arm: str, ratio: tuple[float, float, float]) -> str:
    return f"{arm} {ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"


def _estimate(logs: list[float]) -> tuple[float, float, float]:
    """exp of the mean, with a percentile bootstrap interval over prompts."""
    values, rng = np.array(logs), np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    ends = np.exp(np.quantile(means, [0.025, 0.975]))
    return round(float(np.exp(values.mean())), 3), round(float(ends[0]), 3), round(float(ends[1]), 3)
