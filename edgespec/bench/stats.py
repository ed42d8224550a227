"""Compute a Summary from records: speedups paired with plain decoding by prompt, with confidence intervals."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from edgespec.bench.records import AUTOPILOT, PLAIN, Cost, Header, Record, Run
from edgespec.bench.summary import Group, Point, Ratio, Section, Summary
from edgespec.core.metrics import Metrics

_RESAMPLES, _SEED = 10_000, 0


def summarize(records: Sequence[Record]) -> Summary:
    """The statistics of one benchmark, from the records of `read_records`."""
    (header,) = (r for r in records if isinstance(r, Header))
    runs = [r for r in records if isinstance(r, Run)]
    points = _pair_points(runs)
    return Summary(
        header=header,
        costs=tuple(r for r in records if isinstance(r, Cost)),
        runs=len(runs),
        short_runs=sum(r.metrics.tokens_per_second is None for r in runs),
        forks=sum(r.fork is not None for r in runs),
        faults=sum(r.fork is not None and not r.fork.near_tie for r in runs),
        parts=tuple(
            _summarize_section(warm, [r for r in runs if r.warm == warm], [p for p in points if p.warm == warm])
            for warm in sorted({r.warm for r in runs})
        ),
        points=points,
    )


def _pair_points(runs: Iterable[Run]) -> tuple[Point, ...]:
    speeds: dict[tuple[str, str, float, bool, str], list[float]] = defaultdict(list)
    for run in runs:
        if run.metrics.tokens_per_second is not None:
            speeds[run.prompt, run.category, run.temperature, run.warm, run.arm].append(run.metrics.tokens_per_second)
    medians = {key: float(np.median(values)) for key, values in speeds.items()}
    plain = {key[:4]: speed for key, speed in medians.items() if key[4] == PLAIN}
    return tuple(Point(*key, v, v / plain[key[:4]] if key[:4] in plain else None) for key, v in medians.items())


def _summarize_section(warm: bool, runs: Sequence[Run], points: Sequence[Point]) -> Section:
    arms = sorted({r.arm for r in runs}, key=_arm_order)
    categories = list(dict.fromkeys(r.category for r in runs))
    temperatures = sorted({r.temperature for r in runs})
    splits = product((None, *categories), (None, *temperatures) if len(temperatures) > 1 else (None,))
    groups = [_summarize_group(arm, *split, runs, points) for split in splits for arm in arms]
    drafters: dict[str, list[Metrics]] = defaultdict(list)
    for run in runs:
        drafters[re.sub(r"\s+\d+$", "", run.arm)].append(run.metrics)
    prompts, speeds = _complete_points(points)
    fixed = [arm for arm in arms if arm in speeds and arm != PLAIN and not _is_autopilot(arm)]
    best_fixed = max(fixed, key=lambda arm: float(np.log(speeds[arm]).mean()), default=None)
    oracle = np.maximum.reduce([speeds[arm] for arm in (PLAIN, *fixed)]) if fixed and PLAIN in speeds else None

    def compare(of: NDArray[np.float64] | None, to: NDArray[np.float64] | None) -> Ratio | None:
        if of is None or to is None:
            return None
        return _bootstrap_ratio(list(zip(prompts, (of / to).tolist(), strict=True)))

    return Section(
        warm=warm,
        arms=tuple(g for g in groups if g.category is None and g.temperature is None),
        splits=tuple(g for g in groups if g.runs and (g.category is not None or g.temperature is not None)),
        alpha_by_drafter={name: _mean_alpha_by_depth(drafters[name]) for name in sorted(drafters, key=_arm_order)},
        finished=len(prompts),
        best_fixed=best_fixed,
        oracle=compare(oracle, speeds.get(PLAIN)),
        autopilot_to_best_fixed=compare(speeds.get(AUTOPILOT), speeds.get(best_fixed or "")),
        autopilot_to_oracle=compare(speeds.get(AUTOPILOT), oracle),
    )


def _is_autopilot(arm: str) -> bool:
    """Whether an arm is the autopilot or a variant of it, such as "autopilot cold"."""
    return arm.split(" ")[0] == AUTOPILOT


def _arm_order(arm: str) -> tuple[bool, bool, list[str | int]]:
    """Sort key: plain decoding, the autopilot, then the others by name and number."""
    return arm != PLAIN, not _is_autopilot(arm), [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", arm)]


def _complete_points(points: Iterable[Point]) -> tuple[list[str], dict[str, NDArray[np.float64]]]:
    """The prompts of the points that every arm has, and each arm's tokens/s at them."""
    by_point: dict[tuple[str, str, float], dict[str, float]] = defaultdict(dict)
    for p in points:
        by_point[p.prompt, p.category, p.temperature][p.arm] = p.tokens_per_second
    arms = {arm for speeds in by_point.values() for arm in speeds}
    finished = {key: speeds for key, speeds in by_point.items() if len(speeds) == len(arms)}
    tokens_per_second = {arm: np.array([speeds[arm] for speeds in finished.values()]) for arm in arms}
    return [prompt for prompt, *_ in finished], tokens_per_second if finished else {}


def _summarize_group(
    arm: str, category: str | None, temperature: float | None, runs: Iterable[Run], points: Iterable[Point]
) -> Group:
    def inside(x: Run | Point) -> bool:
        return x.arm == arm and category in (None, x.category) and temperature in (None, x.temperature)

    runs = [r for r in runs if inside(r)]
    points = [p for p in points if inside(p)]
    metrics = [r.metrics for r in runs]
    timed = [m for m in metrics if m.tokens_per_second is not None]
    speeds = [p.tokens_per_second for p in points]
    paired = [(p.prompt, p.ratio) for p in points if p.ratio is not None]
    ratios = np.array([ratio for _, ratio in paired])
    drafted, forwards = sum(m.drafted_tokens for m in metrics), sum(m.target_forwards for m in metrics)
    times = {part: sum(getattr(m, f"{part}_s") for m in timed) for part in ("draft", "verify", "sample", "commit")}
    decoded = [(r.bound_s, (r.metrics.tpot_s or 0) * (r.metrics.emitted_tokens - 1)) for r in runs]
    copied: dict[tuple[str, float], list[float]] = defaultdict(list)
    for r in runs:
        if r.copied_tokens and r.copied_s:
            copied[r.prompt, r.temperature].append(r.copied_tokens / r.copied_s)
    repeating = [
        (p.prompt, float(np.median(copied[p.prompt, p.temperature])) * p.ratio / p.tokens_per_second)
        for p in points
        if p.ratio is not None and (p.prompt, p.temperature) in copied
    ]
    return Group(
        arm=arm,
        category=category,
        temperature=temperature,
        runs=len(runs),
        short_runs=len(runs) - len(timed),
        unpaired=len(points) - len(paired),
        speedup=_bootstrap_ratio(paired),
        where_repeating=_bootstrap_ratio(repeating),
        worst_decile=float(np.percentile(ratios, 10)) if paired else None,
        below_one=float((ratios < 1).mean()) if paired else None,
        tokens_per_second=tuple(np.percentile(speeds, (25, 50, 75)).tolist()) if speeds else (),
        tau=sum(m.emitted_tokens - 1 for m in metrics if m.target_forwards) / forwards if forwards else None,
        acceptance_rate=sum(m.accepted_tokens for m in metrics) / drafted if drafted else None,
        alpha_by_depth=_mean_alpha_by_depth(metrics),
        time_shares={part: time / sum(times.values()) for part, time in times.items() if sum(times.values())},
        ttft_s=_median(m.ttft_s for m in metrics),
        step_p50_s=_median(m.step_p50_s for m in metrics),
        step_p99_s=_median(m.step_p99_s for m in metrics),
        achieved=_median(bound_s / s for bound_s, s in decoded if bound_s is not None and s > 0),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.median(known)) if known else None


def _mean_alpha_by_depth(metrics: Iterable[Metrics]) -> tuple[float, ...]:
    """See Group.alpha_by_depth."""
    tested: dict[int, float] = defaultdict(float)
    accepted: dict[int, float] = defaultdict(float)
    for m in metrics:
        reaching = float(m.target_forwards)
        for depth, alpha in enumerate(m.alpha_by_depth):
            tested[depth] += reaching
            reaching *= alpha
            accepted[depth] += reaching
    return tuple(accepted[depth] / tested[depth] for depth in sorted(tested) if tested[depth])


def _bootstrap_ratio(pairs: Sequence[tuple[str, float]]) -> Ratio | None:
    """Geometric mean with a percentile bootstrap interval: resamples prompts, each with all its ratios."""
    if not pairs:
        return None
    prompts, ratios = [prompt for prompt, _ in pairs], np.array([ratio for _, ratio in pairs])
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    which = [numbers[prompt] for prompt in prompts]
    sums, counts = np.bincount(which, np.log(ratios)), np.bincount(which)
    geomean = float(np.exp(np.log(ratios).mean()))
    if len(numbers) == 1:
        return Ratio(geomean, None, None, len(prompts))
    drawn = np.random.default_rng(_SEED).integers(len(numbers), size=(_RESAMPLES, len(numbers)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.exp(np.percentile(means, (2.5, 97.5))).tolist()
    return Ratio(geomean, low, high, len(prompts))
