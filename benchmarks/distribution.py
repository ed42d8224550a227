"""Chi-square of the sampled loop on real logits, for every acceptance rule.

    uv run python -m benchmarks.law [--samples 5000] [--backend mlx] [--target T.gguf] [--draft D.gguf]

Temperature 1, top-k 3: 27 bins for the joint law of three tokens, whose critical value at size 1e-3 is 54.05. With
power 0.95 about 5,000 samples see a total variation of 0.05. stdout ends with one JSON line.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.machine import describe
from edgespec.backends import BackendName, open_model
from edgespec.backends.options import LoadOptions
from edgespec.bench.distribution_test import compare_distribution
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from laboratory.cost_faithful import EMBEDDED

ARMS = {
    "plain": Speculation("none", 0, 0),
    "sample, chain of 3": Speculation("model", 3, 3),
    "sample, tree of 5": Speculation("model", 2, 5),
    "rejection, chain of 3": Speculation("model", 3, 3, "rejection"),
    "block, chain of 3": Speculation("model", 3, 3, "block"),
}


@click.command()
@click.option("--samples", default=5000, show_default=True)
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp", show_default=True)
@click.option("--target", type=click.Path(exists=True, path_type=Path), default=EMBEDDED)
@click.option("--draft", type=click.Path(exists=True, path_type=Path), default=EMBEDDED.with_name("draft.gguf"))
def main(samples: int, backend: BackendName, target: Path, draft: Path) -> None:
    options = LoadOptions(threads=1, context_size=128)
    models = [open_model(backend, p, options, progress=lambda f: None, check=lambda: None) for p in (target, draft)]
    engine = Engine(models[0], models[1], ARMS["plain"])
    arms = {}
    for name, speculation in ARMS.items():
        engine.speculation = speculation
        arms[name] = asdict(compare_distribution(engine, "self.", SamplingParams(temperature=1.0, top_k=3), 3, samples))
        click.echo(f"{name}: {arms[name]}", err=True)
    engine.close()
    click.echo(
        json.dumps(
            {
                "benchmark": "law",
                "backend": backend,
                "critical_1e-3": 54.05,
                "arms": arms,
                **describe(target, draft),
            }
        )
    )


if __name__ == "__main__":
    main()
