"""The Summary of a benchmark, which `stats` computes, and its table for a terminal."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass

from edgespec.bench.records import AUTOPILOT, Cost, Header

_COLUMNS = 100

# Names of findings in the reports; their keys in JSON are fixed.
_LABELS = {
    "over": "compared",
    "achieved / bound (autopilot)": "autopilot / its upper bound",
    "where the text repeats": "autopilot where the text repeats",
}

_LEGEND = (
    "arms: a drafter with a number drafts that many tokens in every round; the autopilot may ask all drafters; "
    "'autopilot cold' starts each prompt without statistics. x plain: tokens/s over plain decoding, geometric mean of "
    "n results. decile: 10th percentile of x plain. below 1: results slower than plain decoding. tau: tokens per "
    "target forward. p99 ms: 99th percentile of the time of a step. oracle: the fastest of plain decoding and the "
    "fixed arms for each prompt. upper bound: the speed if only the measured time of forwards and drafts counted."
)


@dataclass(frozen=True, slots=True)
class Point:
    """One arm on one prompt: the median tokens/s of its repeats, and its ratio to plain decoding if measured."""

    prompt: str
    category: str
    temperature: float
    warm: bool
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

    short_runs      runs of fewer than two tokens, which have no speed
    unpaired        points without plain decoding of the same prompt, excluded from the ratios
    where_repeating    speedup of the rounds where the text repeats (bench/repetition.py), over all of plain decoding
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
    short_runs: int
    unpaired: int
    speedup: Ratio | None
    where_repeating: Ratio | None
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
class Section:
    """Either the cold runs or the warm ones: a repeated prompt measures what lookups remember.

    splits          groups by category, by temperature (if there are several), and by both
    best_fixed      the fastest arm of fixed depth, chosen with hindsight
    oracle          the fastest of plain and the fixed arms for each prompt, over plain; noise biases it upwards
    finished        number of points that every arm has; best_fixed, oracle and their ratios use only these
    """

    warm: bool
    arms: tuple[Group, ...]
    splits: tuple[Group, ...]
    alpha_by_drafter: dict[str, tuple[float, ...]]
    finished: int
    best_fixed: str | None
    oracle: Ratio | None
    autopilot_to_best_fixed: Ratio | None
    autopilot_to_oracle: Ratio | None

    def findings(self) -> dict[str, str]:
        """The autopilot's main results, as text."""
        autopilot = next((g for g in self.arms if g.arm == AUTOPILOT), None)
        repeating = autopilot.where_repeating if autopilot else None
        return {
            "best fixed (with hindsight)": self.best_fixed or "-",
            "autopilot / best fixed": str(self.autopilot_to_best_fixed or "-"),
            "oracle / plain": str(self.oracle or "-"),
            "autopilot / oracle": str(self.autopilot_to_oracle or "-"),
            "over": f"{self.finished} pairs of prompt and temperature that every arm completed",
            "achieved / bound (autopilot)": format_value(autopilot.achieved if autopilot else None),
            "where the text repeats": f"{repeating} x plain, {repeating.n} prompts" if repeating else "no text repeats",
        }

    def labeled_findings(self) -> dict[str, str]:
        """`findings`, named for readers of a report."""
        return {_LABELS.get(name, name): value for name, value in self.findings().items()}

    @property
    def title(self) -> str:
        return f"Lookups in {'all texts' if self.warm else 'the current text only'}"

    def by_category(self, arm: str) -> list[Group]:
        return [g for g in self.splits if g.arm == arm and g.temperature is None]

    def by_temperature(self, arm: str) -> list[Group]:
        return [g for g in self.splits if g.arm == arm and g.category is None]


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of a report, cold runs first. `faults` are divergences that are not near-ties."""

    header: Header
    costs: tuple[Cost, ...]
    runs: int
    short_runs: int
    forks: int
    faults: int
    parts: tuple[Section, ...]
    points: tuple[Point, ...]

    def counts(self) -> dict[str, str]:
        """Numbers of runs and of excluded ones, as text."""
        unpaired = sum(g.unpaired for part in self.parts for g in part.arms)
        return {
            "runs": str(self.runs),
            "runs excluded (fewer than two tokens)": str(self.short_runs),
            "results excluded (no plain run to compare with)": str(unpaired),
            "greedy outputs that differ from plain decoding's": str(self.forks),
            "of these by an error, not by rounding": str(self.faults),
        }

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def format_value(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def make_printable(text: str) -> str:
    """`text` on one line, without control characters and lone surrogates."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def format_table(summary: Summary) -> str:
    """The tables for a terminal, at most 100 columns wide."""
    label = {"***": f"{summary.header.label} ***"} if summary.header.label else {}
    lines = [*_wrap(label), *_wrap(summary.header.facts()), *_wrap(summary.counts())]
    for part in summary.parts:
        lines += ["", part.title, *_format_rows("arm", {g.arm: g for g in part.arms}), ""]
        lines += [
            make_printable(f"{name + ':':<33} {value}")[:_COLUMNS] for name, value in part.labeled_findings().items()
        ]
        lines += _format_rows("autopilot by category", {g.category or "none": g for g in part.by_category(AUTOPILOT)})
        lines += _format_rows("autopilot by T", {f"T = {g.temperature:g}": g for g in part.by_temperature(AUTOPILOT)})
    return "\n".join([*lines, "", *textwrap.wrap(_LEGEND, _COLUMNS)])


def _wrap(facts: dict[str, str]) -> list[str]:
    return textwrap.wrap(make_printable("; ".join(f"{name} {value}" for name, value in facts.items())), _COLUMNS)


def _format_rows(heading: str, groups: dict[str, Group]) -> list[str]:
    """A table with column headings; no lines without groups."""
    form = "{:<19.19} {:>4} {:>18} {:>6} {:>8} {:>6} {:>9} {:>7} {:>7} {:>7}"
    rows = [
        form.format(
            make_printable(name),
            g.speedup.n if g.speedup else 0,
            str(g.speedup or "-"),
            format_value(g.worst_decile),
            format_value(g.below_one, ".0%"),
            format_value(g.tau),
            format_value(g.acceptance_rate, ".0%"),
            format_value(g.tokens_per_second[1] if g.tokens_per_second else None, ".1f"),
            format_value(1000 / g.tokens_per_second[1] if g.tokens_per_second else None, ".1f"),
            format_value(1000 * g.step_p99_s if g.step_p99_s is not None else None, ".1f"),
        )
        for name, g in groups.items()
    ]
    heads = (heading, "n", "x plain (95% CI)", "decile", "below 1", "tau", "accepted", "tok/s", "ms/tok", "p99 ms")
    return ["", form.format(*heads), *rows] if rows else []
