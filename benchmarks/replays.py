"""The autopilot on recorded texts and virtual clocks, against every fixed length chosen with hindsight.

    uv run python -m benchmarks.traces traces.json.gz --per-category 3
    uv run python -m benchmarks.replays traces.json.gz --seeds 5 [--tokens 48] [--category code_edit]

The controller is told noisy times, each seed with noise of its own, and charged for exact ones; the cost curves are
measured ones. Texts come one after the other, with what is learned from each. Geometric means over texts, of seeds the
median and the extremes. stdout ends with one JSON line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import click

from tests.controller.replay import CURVES, Trace, autopilot_speeds, clock_of, fixed_speeds, mean, oracle, read_traces


def compared(traces: list[Trace], curve: str, seeds: int) -> dict[str, object]:
    """What one curve gives: speeds in multiples of plain decoding, and the autopilot's over the best of others."""
    fixed = fixed_speeds(traces, clock_of(curve))
    (source, gamma), best = max(fixed.items(), key=lambda each: mean(each[1]))
    ours = [autopilot_speeds(traces, clock_of(curve, seed=seed)) for seed in range(seeds)]
    speeds = sorted(mean(each) for each in ours)
    speed = median(speeds)
    return {
        "curve": curve,
        "autopilot": speed,
        "extremes": (speeds[0], speeds[-1]),
        "best": f"{source} {gamma}",
        "best_speed": mean(best),
        "over_best": speed / max(1.0, mean(best)),
        "over_oracle": speed / mean(oracle(fixed)),
        "slowest_text": min(float(each.min()) for each in ours),
    }


@click.command()
@click.argument("traces", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--seeds", default=5, show_default=True)
@click.option("--tokens", type=int, help="Of each text, from its beginning.  [default: all]")
@click.option("--category", "categories", multiple=True, help="May be repeated.  [default: all]")
@click.option("--curve", "curves", multiple=True, type=click.Choice(list(CURVES)), help="[default: all]")
def main(traces: Path, seeds: int, tokens: int | None, categories: tuple[str, ...], curves: tuple[str, ...]) -> None:
    """See the module."""
    texts = [replace(each, text=each.text[:tokens]) for each in read_traces(traces)]
    texts = [each for each in texts if not categories or each.category in categories]
    results = []
    print(f"{len(texts)} texts of {sum(len(each.text) for each in texts) / len(texts):.0f} tokens")
    for curve in curves or CURVES:
        found = compared(texts, curve, seeds)
        results.append(found)
        low, high = found["extremes"]  # type: ignore[misc]
        print(
            f"{curve:9} {found['autopilot']:.3f} ({low:.3f} to {high:.3f}); {found['best']} {found['best_speed']:.3f}; "
            f"over it {found['over_best']:.3f}, over each text's best {found['over_oracle']:.3f}, "
            f"slowest text {found['slowest_text']:.2f}",
            flush=True,
        )
    print(json.dumps({"texts": len(texts), "seeds": seeds, "results": results}))


if __name__ == "__main__":
    main()
