"""The statistics of a benchmark, and its table for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.bench.records import Cost, Header, Record, Run
from edgespec.bench.runner import AUTOPILOT, PLAIN
from edgespec.core.metrics import Metrics
from edgespec.models.short_names import shorten_names

_COLUMNS = 100

_LEGEND = (
    "arms: a drafter with a number drafts that many tokens in every round; the autopilot may ask all drafters; "
    "'autopilot cold' starts each prompt without statistics. speedup: tokens/s over plain decoding, geometric mean of "
    "n results. decile: 10th percentile of the speedup. below 1: results slower than plain decoding. tau: tokens per "
    "target forward. p99 ms: 99th percentile of the time of a step. oracle: the fastest of plain decoding and the "
    "fixed arms for each prompt. bound: the speed if only the measured time of forwards and drafts counted."
)


@dataclass(frozen=True, slots=True)
class Point:
    """One arm on one prompt: the median tokens/s of its repeats, and its ratio to plain decoding if measured."""

    prompt: str
    category: str
    temperature: float
    arm: str
    tokens_per_second: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of `n` ratios with its 95% interval, which needs more than one prompt."""

    geomean: float
    low: float | None
    high: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.geomean:.2f}" + (f" ({self.low:.2f}-{self.high:.2f})" if self.low is not None else "")


@dataclass(frozen=True, slots=True)
class Group:
    """One arm over everything, or over one category, one temperature, or both.

    unpaired        points without plain decoding of the same prompt, excluded from the ratios
    worst_decile    10th percentile of the ratios; `below_one` is the share of ratios under 1
    tokens_per_second    25th, 50th and 75th percentile over points
    tau, acceptance_rate    ratios of sums over runs
    alpha_by_depth  mean over runs, weighted by target_forwards times the run's alphas at smaller depths: the tokens
                    tested at a depth if every forward had a draft that deep (runs do not record the real number)
    time_shares     draft, verify, sample and commit as shares of their sum, over the runs that have a speed
    ttft_s ... achieved    medians over runs; `achieved` is bound_s over the decoding time
    """

    arm: str
    category: str | None
    temperature: float | None
    runs: int
    unpaired: int
    speedup: Ratio | None
    worst_decile: float | None
    below_one: float | None
    tokens_per_second: tuple[float, ...]
    tau: float | None
    acceptance_rate: float | None
    alpha_by_depth: tuple[float, ...]
    time_shares: dict[str, float]
    ttft_s: float | None
    step_p50_s: float | None
    step_p99_s: float | None
    achieved: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What a benchmark has found.

    faults       divergences that are not near-ties
    splits       groups by category, by temperature (if there are several), and by both
    finished     number of points that every arm has; best_fixed, oracle and their ratios use only these
    best_fixed   the fastest arm of fixed depth, chosen with hindsight
    oracle       the fastest of plain and the fixed arms for each prompt, over plain; noise biases it upwards
    """

    header: Header
    costs: tuple[Cost, ...]
    runs: int
    short_runs: int
    forks: int
    faults: int
    arms: tuple[Group, ...]
    splits: tuple[Group, ...]
    finished: int
    best_fixed: str | None
    oracle: Ratio | None
    autopilot_to_best_fixed: Ratio | None
    autopilot_to_oracle: Ratio | None

    def counts(self) -> dict[str, str]:
        """Numbers of runs and of excluded ones, as text."""
        return {
            "runs": str(self.runs),
            "runs excluded (fewer than two tokens)": str(self.short_runs),
            "results excluded (no plain run to compare with)": str(sum(g.unpaired for g in self.arms)),
            "greedy outputs that differ from plain decoding's": str(self.forks),
            "of these by an error, not by rounding": str(self.faults),
        }

    def findings(self) -> dict[str, str]:
        """The autopilot's main results, as text; empty if nothing ran. Their names are keys of the JSON line."""
        if not self.arms:
            return {}
        autopilot = next((g for g in self.arms if g.arm == AUTOPILOT), None)
        return {
            "best fixed (with hindsight)": self.best_fixed or "-",
            "autopilot / best fixed": str(self.autopilot_to_best_fixed or "-"),
            "oracle / plain": str(self.oracle or "-"),
            "autopilot / oracle": str(self.autopilot_to_oracle or "-"),
            "over": f"{self.finished} pairs of prompt and temperature that every arm completed",
            "achieved / bound (autopilot)": _format_value(autopilot.achieved if autopilot else None),
        }

    def describe(self) -> dict[str, Any]:
        """The figures as JSON has them, without prompts and folders."""
        models = {name: shorten_names(getattr(self.header, name) or "none") for name in ("model", "draft")}
        return {
            "header": {**asdict(self.header), **models},
            "runs": self.runs,
            "forks": self.forks,
            "faults": self.faults,
            "costs": [asdict(cost) for cost in self.costs],
            "arms": [asdict(group) for group in (*self.arms, *self.splits)],
            "findings": self.findings(),
        }

    def by_category(self, arm: str) -> list[Group]:
        return [g for g in self.splits if g.arm == arm and g.temperature is None]

    def by_temperature(self, arm: str) -> list[Group]:
        return [g for g in self.splits if g.arm == arm and g.category is None]


def _format_value(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _make_printable(text: str) -> str:
    """`text` on one line, without control characters and lone surrogates."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def format_table(summary: Summary) -> str:
    """The tables for a terminal, at most 100 columns wide."""
    lines = [*_wrap(summary.header.facts()), *_wrap(summary.counts())]
    lines += [*_format_rows("arm", {g.arm: g for g in summary.arms}), ""]
    lines += [_make_printable(f"{name + ':':<33} {value}")[:_COLUMNS] for name, value in summary.findings().items()]
    by_category = {g.category or "none": g for g in summary.by_category(AUTOPILOT)}
    by_temperature = {f"T = {g.temperature:g}": g for g in summary.by_temperature(AUTOPILOT)}
    lines += [*_format_rows("autopilot, category", by_category), *_format_rows("autopilot, T", by_temperature)]
    return "\n".join([*lines, "", *textwrap.wrap(_LEGEND, _COLUMNS)])


def _wrap(facts: dict[str, str]) -> list[str]:
    return textwrap.wrap(_make_printable("; ".join(f"{name} {value}" for name, value in facts.items())), _COLUMNS)


def _format_rows(heading: str, groups: dict[str, Group]) -> list[str]:
    """A table with column headings; no lines without groups."""
    form = "{:<19.19} {:>4} {:>18} {:>6} {:>8} {:>6} {:>9} {:>7} {:>7} {:>7}"
    rows = [
        form.format(
            _make_printable(name),
            g.speedup.n if g.speedup else 0,
            str(g.speedup or "-"),
            _format_value(g.worst_decile),
            _format_value(g.below_one, ".0%"),
            _format_value(g.tau),
            _format_value(g.acceptance_rate, ".0%"),
            _format_value(g.tokens_per_second[1] if g.tokens_per_second else None, ".1f"),
            _format_value(1000 / g.tokens_per_second[1] if g.tokens_per_second else None, ".1f"),
            _format_value(1000 * g.step_p99_s if g.step_p99_s is not None else None, ".1f"),
        )
        for name, g in groups.items()
    ]
    heads = (heading, "n", "speedup (95% CI)", "decile", "below 1", "tau", "accepted", "tok/s", "ms/tok", "p99 ms")
    return ["", form.format(*heads), *rows] if rows else []


_RESAMPLES, _SEED = 10_000, 0


def summarize(records: Sequence[Record]) -> Summary:
    """The statistics of one benchmark, from its header, costs and runs; speedups are paired by prompt."""
    (header,) = (r for r in records if isinstance(r, Header))
    runs = [r for r in records if isinstance(r, Run)]
    points = _pair_points(runs)
    arms = sorted({r.arm for r in runs}, key=_arm_order)
    categories = list(dict.fromkeys(r.category for r in runs))
    temperatures = sorted({r.temperature for r in runs})
    splits = product((None, *categories), (None, *temperatures) if len(temperatures) > 1 else (None,))
    groups = [_summarize_group(arm, *split, runs, points) for split in splits for arm in arms]
    prompts, speeds = _complete_points(points)
    fixed = [arm for arm in arms if arm in speeds and arm != PLAIN and not _is_autopilot(arm)]
    best_fixed = max(fixed, key=lambda arm: float(np.log(speeds[arm]).mean()), default=None)
    oracle = np.maximum.reduce([speeds[arm] for arm in (PLAIN, *fixed)]) if fixed and PLAIN in speeds else None

    def compare(of: NDArray[np.float64] | None, to: NDArray[np.float64] | None) -> Ratio | None:
        if of is None or to is None:
            return None
        return _bootstrap_ratio(list(zip(prompts, (of / to).tolist(), strict=True)))

    return Summary(
        header=header,
        costs=tuple(r for r in records if isinstance(r, Cost)),
        runs=len(runs),
        short_runs=sum(r.metrics.tokens_per_second is None for r in runs),
        forks=sum(r.fork is not None for r in runs),
        faults=sum(r.fork is not None and not r.fork.is_near_tie for r in runs),
        arms=tuple(g for g in groups if g.category is None and g.temperature is None),
        splits=tuple(g for g in groups if g.runs and (g.category is not None or g.temperature is not None)),
        finished=len(prompts),
        best_fixed=best_fixed,
        oracle=compare(oracle, speeds.get(PLAIN)),
        autopilot_to_best_fixed=compare(speeds.get(AUTOPILOT), speeds.get(best_fixed or "")),
        autopilot_to_oracle=compare(speeds.get(AUTOPILOT), oracle),
    )


def _pair_points(runs: Iterable[Run]) -> tuple[Point, ...]:
    speeds: dict[tuple[str, str, float, str], list[float]] = defaultdict(list)
    for run in runs:
        if run.metrics.tokens_per_second is not None:
            speeds[run.prompt, run.category, run.temperature, run.arm].append(run.metrics.tokens_per_second)
    medians = {key: float(np.median(values)) for key, values in speeds.items()}
    plain = {key[:3]: speed for key, speed in medians.items() if key[3] == PLAIN}
    return tuple(Point(*key, v, v / plain[key[:3]] if key[:3] in plain else None) for key, v in medians.items())


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
    return Group(
        arm=arm,
        category=category,
        temperature=temperature,
        runs=len(runs),
        unpaired=len(points) - len(paired),
        speedup=_bootstrap_ratio(paired),
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
