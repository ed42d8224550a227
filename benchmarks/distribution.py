"""Chi-square test of the sampled loop on real logits, for every acceptance rule.

    uv run python -m benchmarks.distribution [--samples 5000] [--backend mlx] [--target T.gguf] [--draft D.gguf]

The test compares the joint distribution of three tokens at temperature 1, top-k 3: 27 bins, whose critical value at
size 1e-3 is 54.05. About 5,000 samples detect a total variation of 0.05 with power 0.95. stdout ends with one JSON
line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.harness import DRAFT, MODEL_PATH, PLAIN, TARGET, load_pair, print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import encode_prompt

PROMPT, LENGTH = "self.", 3  # LENGTH tokens after PROMPT
CRITICAL = 54.05  # of chi-square with 26 degrees of freedom, size 1e-3
ARMS = {
    "plain": PLAIN,
    "sample, chain of 3": Speculation(("model",), 3, 3),
    "sample, tree of 5": Speculation(("model",), 2, 5),
    "rejection, chain of 3": Speculation(("model",), 3, 3, "rejection"),
    "block, chain of 3": Speculation(("model",), 3, 3, "block"),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pearson's chi-square over the possible sequences; `tv` is the total variation distance."""

    samples: int
    bins: int
    chi_square: float
    tv: float
    smallest_expected: float


def enumerate_distribution(
    engine: Engine, prompt: str, sampling: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    """P(first `length` tokens) after `prompt`, by plain forwards; `sampling` should keep few tokens (top-k)."""
    vocab_size = engine.target.tokenizer.vocab_size
    session = engine.target.open_session()
    sampler = Sampler(sampling, vocab_size)
    tokens = encode_prompt(engine.target.tokenizer, prompt, parse_special=True)
    distribution: dict[tuple[int, ...], float] = {}

    def extend(emitted: tuple[int, ...], weight: float) -> None:
        if len(emitted) == length:
            distribution[emitted] = weight
            return
        text = [*tokens, *emitted]
        read_prompt(session, text[:-1])
        p = sampler.distribution(session.forward(text[-1], NO_DRAFT).logits(0), text).dense(vocab_size)
        session.commit(())
        for token in np.flatnonzero(p).tolist():
            extend((*emitted, token), weight * float(p[token]))

    try:
        extend((), 1.0)
    finally:
        session.close()
    return distribution


def compare_distribution(
    engine: Engine, prompt: str, sampling: SamplingParams, length: int, samples: int
) -> Comparison:
    """Generate `samples` times, with seeds 0, 1, 2 ..., and compare the first `length` tokens with their distribution.

    Generates two more tokens, so that drafts reach beyond the compared ones. Raises ValueError for a sequence that has
    probability zero.
    """
    distribution = enumerate_distribution(engine, prompt, sampling, length)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(samples):
        *_, finished = engine.stream(Request(prompt, sampling, max_tokens=length + 2, seed=seed))
        assert isinstance(finished, Finished)
        counts[finished.tokens[:length]] += 1
    if impossible := set(counts) - set(distribution):
        raise ValueError(f"the loop emitted {impossible}, which have probability zero")
    expected = np.array(list(distribution.values())) * samples
    observed = np.array([counts[tokens] for tokens in distribution])
    return Comparison(
        samples,
        len(distribution),
        float(((observed - expected) ** 2 / expected).sum()),
        float(np.abs(observed - expected).sum() / 2 / samples),
        float(expected.min()),
    )


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
