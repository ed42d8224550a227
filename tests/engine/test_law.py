"""Temperature 1 on real GGUF logits: the sampled loop against the enumerated distribution, by chi-square."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine import Engine, Request, Speculation
from edgespec.text.chat import encode_prompt
from tests.engine.conftest import generate

PROMPT = "def get_"
PARAMS = SamplingParams(temperature=1.0, top_k=4)  # 4 x 4 = 16 bins for the joint law of two tokens
SAMPLES = 1500
CRITICAL = 37.70  # chi-square, 15 degrees of freedom, size 1e-3


def enumerated(engine: Engine) -> dict[tuple[int, int], float]:
    """P(token 1, token 2) from plain forwards."""
    session = engine.target.open_session(lambda: None)
    sampler = Sampler(PARAMS, engine.target.tokenizer.vocab_size)
    prompt = encode_prompt(engine.target.tokenizer, PROMPT, parse_special=True)
    for _ in session.prefill(prompt[:-1]):
        pass
    first = sampler.law(session.forward(prompt[-1], NO_DRAFT).logits(0).copy(), prompt)
    session.commit(())
    law = {}
    assert first.ids is not None
    for i, token in enumerate(first.ids.tolist()):
        second = sampler.law(session.forward(token, Draft.chain(())).logits(0), [*prompt, token])
        session.commit(())
        session.rewind(len(prompt))
        assert second.ids is not None
        for j, other in enumerate(second.ids.tolist()):
            p = first.weights[i] / first.weights.sum() * second.weights[j] / second.weights.sum()
            law[token, other] = float(p)
    session.close()
    return law


@pytest.mark.parametrize(
    "speculation",
    [
        Speculation("model", 3, 3),
        Speculation("model", 2, 5),
        Speculation("model", 3, 3, "rejection"),
        Speculation("model", 3, 3, "block"),
    ],
    ids=["sample", "sample-tree", "rejection", "block"],
)
def test_two_tokens_follow_the_enumerated_law(engine: Engine, speculation: Speculation) -> None:
    law = enumerated(engine)
    assert abs(sum(law.values()) - 1) < 1e-6
    engine.speculation = speculation
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(SAMPLES):
        _, finished = generate(engine, Request(PROMPT, PARAMS, max_tokens=3, seed=seed))
        counts[finished.tokens[:2]] += 1
    assert set(counts) <= set(law)
    expected = np.array([law[pair] for pair in law]) * SAMPLES
    observed = np.array([counts[pair] for pair in law])
    assert expected.min() > 1  # or chi-square would not apply
    chi = float(((observed - expected) ** 2 / expected).sum())
    assert chi < CRITICAL, (chi, dict(counts))
