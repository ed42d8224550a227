"""The sampled loop against the enumerated law of its first two tokens, on a real model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from edgespec.core.protocols import NO_DRAFT
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine import Engine, Finished, Request
from edgespec.text.chat import encode_prompt


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pearson's chi-square over the pairs that can occur; `tv` is the distance between frequencies and law."""

    samples: int
    bins: int
    chi_square: float
    tv: float
    smallest_expected: float


def enumerated(engine: Engine, prompt: str, sampling: SamplingParams) -> dict[tuple[int, int], float]:
    """P(token 1, token 2) after `prompt`, from plain forwards; `sampling` should keep few tokens (top-k)."""
    tokenizer = engine.target.tokenizer
    session = engine.target.open_session(lambda: None)
    sampler = Sampler(sampling, tokenizer.vocab_size)
    tokens = encode_prompt(tokenizer, prompt, parse_special=True)
    for _ in session.prefill(tokens):
        pass
    session.rewind(len(tokens) - 1)
    first = sampler.law(session.forward(tokens[-1], NO_DRAFT).logits(0).copy(), tokens).dense(tokenizer.vocab_size)
    session.commit(())
    law = {}
    for token in np.flatnonzero(first).tolist():
        scores = session.forward(token, NO_DRAFT)
        second = sampler.law(scores.logits(0), [*tokens, token]).dense(tokenizer.vocab_size)
        session.commit(())
        session.rewind(len(tokens))
        for other in np.flatnonzero(second).tolist():
            law[token, other] = float(first[token] * second[other])
    session.close()
    return law


def compare(engine: Engine, prompt: str, sampling: SamplingParams, samples: int) -> Comparison:
    """Generate three tokens `samples` times, with seeds 0, 1, 2 ..., and compare the first two with the law.

    Raises ValueError when the loop emits a pair to which the law gives no probability.
    """
    law = enumerated(engine, prompt, sampling)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(samples):
        *_, finished = engine.stream(Request(prompt, sampling, max_tokens=3, seed=seed))
        assert isinstance(finished, Finished)
        counts[finished.tokens[:2]] += 1
    if impossible := set(counts) - set(law):
        raise ValueError(f"the loop emitted {impossible}, which the target cannot")
    expected = np.array(list(law.values())) * samples
    observed = np.array([counts[pair] for pair in law])
    return Comparison(
        samples,
        len(law),
        float(((observed - expected) ** 2 / expected).sum()),
        float(np.abs(observed - expected).sum() / 2 / samples),
        float(expected.min()),
    )
