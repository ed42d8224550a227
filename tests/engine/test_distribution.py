"""Temperature 1 on real GGUF logits: the sampled loop against the enumerated distribution, by chi-square."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.distribution import compare_distribution, enumerate_distribution
from edgespec.autopilot.speculation import Speculation
from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine

PROMPT = "self."
PARAMS = SamplingParams(temperature=1.0, top_k=2)
LENGTH = 3  # the first token is prefill's, the others are drafted, corrected or bonus: 2 ** 3 = 8 bins
SAMPLES = 400
CRITICAL = 24.32  # chi-square, 7 degrees of freedom, size 1e-3


@pytest.mark.parametrize(
    "speculation",
    [
        Speculation(("model",), 3, 3),
        Speculation(("model",), 3, 3, "rejection"),
        Speculation(("model",), 3, 3, "block"),
        Speculation(("model",), 2, 6, "rejection"),
    ],
    ids=["sample", "rejection", "block", "drawn tree"],
)
def test_three_tokens_follow_the_enumerated_law(engine: Engine, speculation: Speculation) -> None:
    assert sum(enumerate_distribution(engine, PROMPT, PARAMS, LENGTH).values()) == pytest.approx(1)
    engine.speculation = speculation
    found = compare_distribution(engine, PROMPT, PARAMS, LENGTH, SAMPLES)
    assert found.bins == 8
    assert found.smallest_expected > 1  # or chi-square would not apply
    assert found.chi_square < CRITICAL, found


def test_a_tree_that_is_cut_by_what_was_drawn_is_told_apart(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings that are dropped since they are improbable change the law."""
    drawn = DraftTree.drawn

    def cut(tree: DraftTree) -> Draft:
        whole = drawn(tree)
        if whole.q is None:
            return whole
        kept = []
        for node, (token, parent) in enumerate(zip(whole.tokens, whole.parents, strict=True)):
            if parent in kept or (parent < 0 and whole.q[node].argmax() == token):
                kept.append(node)
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        parents = np.array([place[int(whole.parents[node])] for node in kept], np.int32)
        return Draft(whole.tokens[kept], parents, whole.q[kept]) if kept else NO_DRAFT

    monkeypatch.setattr(DraftTree, "drawn", cut)
    engine.speculation = Speculation(("model",), 2, 6, "rejection")
    assert compare_distribution(engine, PROMPT, PARAMS, LENGTH, SAMPLES).chi_square > CRITICAL


def test_another_law_is_told_apart(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comparison fails for a loop that samples at another temperature."""
    engine.speculation = Speculation(("model",), 3, 3)
    stream = engine.stream
    warmer = SamplingParams(temperature=2.5, top_k=2)
    monkeypatch.setattr(
        engine,
        "stream",
        lambda request: stream(type(request)(request.prompt, warmer, request.max_tokens, request.seed)),
    )
    assert compare_distribution(engine, PROMPT, PARAMS, LENGTH, SAMPLES).chi_square > CRITICAL
