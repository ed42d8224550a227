"""Compare sampled output with the enumerated distribution of its first tokens, on a real model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from edgespec.core.greedy import read_prompt
from edgespec.core.protocols import NO_DRAFT
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import encode_prompt


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
    session = engine.target.open_session(lambda: None)
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
