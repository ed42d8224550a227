"""Chi-square test of the sampled loop on real logits, for every acceptance rule.

    uv run python -m benchmarks.distribution [--samples 5000] [--backend mlx] [--target T.gguf] [--draft D.gguf]

The test compares the joint distribution of three tokens at temperature 1, top-k 3: 27 bins, whose critical value at
size 1e-3 is 54.05. About 5,000 samples detect a total variation of 0.05 with power 0.95. stdout ends with one JSON
line.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.harness import DRAFT, MODEL_PATH, PLAIN, TARGET, load_pair, print_result
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import compare_distribution
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation

PROMPT, LENGTH = "self.", 3  # LENGTH tokens after PROMPT
CRITICAL = 54.05  # of chi-square with 26 degrees of freedom, size 1e-3
ARMS = {
    "plain": PLAIN,
    "sample, chain of 3": Speculation(("model",), 3, 3),
    "sample, tree of 5": Speculation(("model",), 2, 5),
    "rejection, chain of 3": Speculation(("model",), 3, 3, "rejection"),
    "block, chain of 3": Speculation(("model",), 3, 3, "block"),
}


@click.command()
@click.option("--samples", type=click.IntRange(1), default=5000, show_default=True)
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp", show_default=True)
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
def main(samples: int, backend: BackendName, target: Path, draft: Path) -> None:
    """Compare the frequencies of SAMPLES generations with the enumerated distribution."""
    engine = load_pair(backend, target, draft, LoadOptions(threads=1, context_size=128))
    arms = {}
    for name, engine.speculation in ARMS.items():
        sampling = SamplingParams(temperature=1.0, top_k=3)
        arms[name] = asdict(compare_distribution(engine, PROMPT, sampling, LENGTH, samples))
        click.echo(f"{name}: {arms[name]}", err=True)
    engine.close()
    print_result("distribution", {"backend": backend, "critical_1e-3": CRITICAL, "arms": arms}, target, draft)


if __name__ == "__main__":
    main()
