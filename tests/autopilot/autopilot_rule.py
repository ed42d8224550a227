"""The autopilot beside a rule of a few lines and beside fixed lengths, on recorded texts and measured cost curves.

    uv run python -m tests.autopilot.autopilot_rule [TRACES.json.gz ...] [--step-ms 0,5] [--seeds 3]

The rule keeps a moving average of the accepted tokens: it goes up with the weight 0.5 and down with 0.2. A draft is as
long as the average, none below 0.3, and every 16 rounds a probe of 2 tokens. Fixed lengths and the rule are the best of
all lengths and drafters, chosen with hindsight on each curve. Speeds are geometric means over texts in multiples of
plain decoding. With --step-ms, a plain step takes so many milliseconds, and the processor time that a controller takes
itself is charged; 0 charges none. stdout has a table in Markdown and ends with one JSON line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import click
import numpy as np

from edgespec.autopilot.fixed import FixedLength
from edgespec.autopilot.stats import DraftStats
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget, Controller, Draft, Round, Step
from edgespec.drafters.ngram import NgramDrafter
from tests.autopilot.replay import (
    CURVES,
    VOCABULARY,
    ReplayDrafter,
    Trace,
    adaptive,
    count_plain_steps,
    make_clock,
    make_profile,
    mean,
    read_traces,
    replay,
)

TRACES = [Path(__file__).with_name(f"{name}.json.gz") for name in ("greedy", "sampled")]
SOURCES = ("ngram", "model", "ngram+model")
LENGTHS = (1, 2, 3, 4, 5, 7)
UP, DOWN, LEAST, PROBE, PROBE_EVERY = 0.5, 0.2, 0.3, 2, 16


class AverageRule(FixedLength):
    """Drafts as many tokens as were accepted of late."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters, Budget(PROBE, PROBE), VOCABULARY)
        self._average = float(PROBE)
        self._n_rounds = 0

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        self._n_rounds += 1
        n = max(1, round(self._average)) if self._average >= LEAST else 0
        if self._n_rounds % PROBE_EVERY == 0:
            n = max(n, PROBE)
        self._budget = Budget(n, n)
        return super().propose(tokens, limit)

    def record(self, step: Step) -> None:
        if step.n_drafted:
            # A draft that was right as a whole could have been longer.
            accepted = step.n_accepted + (step.n_accepted == step.n_drafted)
            self._average += (UP if accepted > self._average else DOWN) * (accepted - self._average)


class Charged:
    """A controller whose own processor time is added to the seconds of drafting, in plain steps of `step_s`."""

    def __init__(self, controller: Controller, step_s: float) -> None:
        self._controller = controller
        self._step_s = step_s
        self._round_s = 0.0
        self.total_s = 0.0  # in plain steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        started_s = thread_time()
        draft = self._controller.propose(tokens, limit)
        self._round_s += thread_time() - started_s
        return draft

    def observe(self, done: Round) -> None:
        started_s = thread_time()
        self._controller.observe(done)
        self._round_s += thread_time() - started_s

    def record(self, step: Step) -> None:
        own_s, self._round_s = self._round_s / self._step_s, 0.0
        self.total_s += own_s
        started_s = thread_time()
        self._controller.record(replace(step, draft_s=step.draft_s + own_s))
        self._round_s = thread_time() - started_s


def measure(
    controller: Controller, model: ReplayDrafter, trace: Trace, curve: str, step_s: float, seed: int | None
) -> float:
    """The speedup of a text over plain decoding; the clock is noisy with a seed."""
    clock = make_clock(curve, seed=seed)
    if not step_s:
        return count_plain_steps(trace) / replay(controller, [model], trace, clock)
    charged = Charged(controller, step_s)
    return count_plain_steps(trace) / (replay(charged, [model], trace, clock) + charged.total_s)


def open_drafters(source: str, model: ReplayDrafter) -> list[Drafter]:
    return [NgramDrafter() if name == "ngram" else model for name in source.split("+")]


def measure_fixed(traces: Sequence[Trace], curve: str, source: str, length: int | None, step_s: float) -> float:
    """Of a fixed length, or of the rule without one."""
    speeds = []
    for trace in traces:
        model = ReplayDrafter(trace)
        drafters = open_drafters(source, model)
        fixed = AverageRule(drafters) if length is None else FixedLength(drafters, Budget(length, length), VOCABULARY)
        speeds.append(measure(fixed, model, trace, curve, step_s, None))
    return mean(np.array(speeds))


def measure_autopilot(traces: Sequence[Trace], curve: str, step_s: float, seed: int) -> float:
    """Of the texts one after another, with what it learns of each."""
    draft_stats, speeds = DraftStats(make_profile(make_clock(curve))), []
    for trace in traces:
        model = ReplayDrafter(trace)
        speeds.append(measure(adaptive(draft_stats, [model]), model, trace, curve, step_s, seed))
    return mean(np.array(speeds))


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--step-ms", default="0", show_default=True, help="Milliseconds of a plain step, separated by commas.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--texts", type=click.IntRange(1), help="Of each file.  [default: all]")
@click.option("--curve", "curves", multiple=True, type=click.Choice(list(CURVES)), help="Repeatable.  [default: all]")
def main(files: tuple[Path, ...], step_ms: str, seeds: int, texts: int | None, curves: tuple[str, ...]) -> None:
    """Replay the texts in FILES, or the recorded ones, on each cost curve."""
    results: list[dict[str, Any]] = []
    click.echo("| texts | cost curve | plain step | autopilot | rule | best fixed length |\n|---|---|---|---|---|---|")
    for file in files or TRACES:
        traces = read_traces(file)[:texts]
        for curve in curves or CURVES:
            for ms in map(float, step_ms.split(",")):
                row = compare(traces, curve, ms / 1000, seeds)
                results.append({"texts": file.name.partition(".")[0], "curve": curve, "step_ms": ms, **row})
                rule, fixed = f"{row['rule']:.2f} ({row['rule_of']})", f"{row['fixed']:.2f} ({row['fixed_of']})"
                step = f"{ms:g} ms" if ms else "not charged"
                click.echo(f"| {results[-1]['texts']} | {curve} | {step} | {row['autopilot']:.2f} | {rule} | {fixed} |")
    click.echo(json.dumps({"benchmark": "autopilot_rule", "seeds": seeds, "results": results}))


def compare(traces: Sequence[Trace], curve: str, step_s: float, seeds: int) -> dict[str, Any]:
    rules = {source: measure_fixed(traces, curve, source, None, step_s) for source in SOURCES}
    fixed = {
        f"{source} {length}": measure_fixed(traces, curve, source, length, step_s)
        for source in SOURCES
        for length in LENGTHS
    }
    best_rule, best = max(rules, key=lambda each: rules[each]), max(fixed, key=lambda each: fixed[each])
    autopilot = median(measure_autopilot(traces, curve, step_s, seed) for seed in range(seeds))
    return {
        "autopilot": round(autopilot, 3),
        "rule": round(rules[best_rule], 3),
        "rule_of": best_rule,
        "fixed": round(fixed[best], 3),
        "fixed_of": best,
    }


if __name__ == "__main__":
    main()
