"""The autopilot on recorded texts and a virtual clock, against every fixed length chosen with hindsight.

    uv run python -m benchmarks.traces traces.json.gz --per-category 3
    uv run python -m tests.autopilot.replays traces.json.gz --seeds 5 [--tokens 48] [--category code_edit]

The controller gets noisy times, with different noise for each seed, and is charged the exact ones; the cost curves are
measured ones. Texts follow one another, and the controller keeps what it learns. Speeds are geometric means over texts,
in multiples of plain decoding; the median and the extremes of the seeds. stdout ends with one JSON line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from tests.autopilot.replay import CURVES, Trace, adaptive_speeds, fixed_speeds, make_clock, mean, oracle, read_traces


def compare_curve(traces: list[Trace], curve: str, seeds: int) -> dict[str, Any]:
    """The autopilot's speed on one cost curve, over the best fixed length and over the best of each text."""
    fixed = fixed_speeds(traces, make_clock(curve))
    (source, gamma), best = max(fixed.items(), key=lambda each: mean(each[1]))
    by_seed = [adaptive_speeds(traces, make_clock(curve, seed=seed)) for seed in range(seeds)]
    speeds = sorted(mean(each) for each in by_seed)
    speed = median(speeds)
    return {
        "curve": curve,
        "autopilot": speed,
        "extremes": (speeds[0], speeds[-1]),
        "best": f"{source} {gamma}",
        "best_speed": mean(best),
        "over_best": speed / max(1.0, mean(best)),
        "over_oracle": speed / mean(oracle(fixed)),
        "slowest_text": min(float(each.min()) for each in by_seed),
    }


@click.command()
@click.argument("traces", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--tokens", type=click.IntRange(2), help="Of each text, from its beginning.  [default: all]")
@click.option("--category", "categories", multiple=True, help="Repeatable.  [default: all]")
@click.option("--curve", "curves", multiple=True, type=click.Choice(list(CURVES)), help="Repeatable.  [default: all]")
def main(traces: Path, seeds: int, tokens: int | None, categories: tuple[str, ...], curves: tuple[str, ...]) -> None:
    """Replay the texts in the file TRACES on each cost curve."""
    texts = [replace(each, text=each.text[:tokens]) for each in read_traces(traces)]
    texts = [each for each in texts if not categories or each.category in categories]
    results = []
    for curve in curves or CURVES:
        row = compare_curve(texts, curve, seeds)
        results.append(row)
        low, high = row["extremes"]
        click.echo(
            f"{curve:9} {row['autopilot']:.3f} ({low:.3f} to {high:.3f}); {row['best']} {row['best_speed']:.3f}; "
            f"ratio {row['over_best']:.3f}, of each text's best {row['over_oracle']:.3f}, "
            f"slowest text {row['slowest_text']:.2f}",
            err=True,
        )
    click.echo(json.dumps({"benchmark": "replays", "texts": len(texts), "seeds": seeds, "results": results}))


if __name__ == "__main__":
    main()
