"""Temperature 1 on real GGUF logits: the sampled loop against the enumerated distribution, by chi-square."""

from __future__ import annotations

import pytest

from edgespec.bench.law import compare, enumerated
from edgespec.core.sampling import SamplingParams
from edgespec.engine import Engine, Speculation

PROMPT = "def get_"
PARAMS = SamplingParams(temperature=1.0, top_k=4)  # 4 x 4 = 16 bins for the joint law of two tokens
SAMPLES = 1500
CRITICAL = 37.70  # chi-square, 15 degrees of freedom, size 1e-3


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
    assert sum(enumerated(engine, PROMPT, PARAMS).values()) == pytest.approx(1)
    engine.speculation = speculation
    found = compare(engine, PROMPT, PARAMS, SAMPLES)
    assert found.bins == 16
    assert found.smallest_expected > 1  # or chi-square would not apply
    assert found.chi_square < CRITICAL, found


def test_another_law_is_told_apart(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comparison fails for a loop that samples at another temperature."""
    engine.speculation = Speculation("model", 3, 3)
    stream = engine.stream
    warmer = SamplingParams(temperature=1.4, top_k=4)
    monkeypatch.setattr(
        engine,
        "stream",
        lambda request: stream(type(request)(request.prompt, warmer, request.max_tokens, request.seed)),
    )
    assert compare(engine, PROMPT, PARAMS, SAMPLES).chi_square > CRITICAL
