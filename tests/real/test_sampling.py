"""Sampled answers: a seed gives one text whatever drafts, and every acceptance rule keeps the target's distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from benchmarks.distribution import enumerate_distribution
from edgespec.core.sampling import SamplingParams
from tests.core.stats import RARE, chi_square
from tests.real.texts import IS_NIGHTLY, Judge, load

SEEDED: dict[str, dict[str, Any]] = {
    "ngram": {"draft_max": 4, "draft_tree": 8},
    "suffix": {"draft_max": 4, "memory": True},
    "recycling": {"draft_max": 3, "draft_tree": 8},
    "lookahead:3,3,3": {"draft_max": 3, "draft_tree": 11},
    "sparse:4,32": {"draft_max": 3},
    "model": {"draft_max": 3},
}
QUESTION = "Tell me a story about a cat, a cat and a cat."
PROMPT = "My favourite"  # after which none of the eight sequences below is rarer than 1 in 28
LENGTH, SAMPLES = 3, 400 if IS_NIGHTLY else 160
# tests/engine/test_distribution.py has the others on each run.
RULES = ("auto", "drawn trees", *(("sample", "rejection", "block") if IS_NIGHTLY else ()))
TOKENS = 24


@pytest.fixture(scope="module")
def expected(folders: Path) -> edgespec.Reply:
    with load("none", exact=True) as model:
        return model.chat(QUESTION, max_tokens=TOKENS, temperature=0.8, seed=11)


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_gives_one_text(expected: edgespec.Reply, draft: Path, name: str) -> None:
    """With `exact`: the rounding of forwards of several rows can change a draw."""
    with load(str(draft) if name == "model" else name, exact=True, **SEEDED[name]) as model:
        for _ in range(1 + ("memory" in SEEDED[name])):  # the memory has nothing to draft from at first
            reply = model.chat(QUESTION, max_tokens=TOKENS, temperature=0.8, seed=11)
            assert reply.tokens == expected.tokens and reply.text == expected.text
    assert reply.stats.drafted_tokens > 0


@pytest.fixture(scope="module")
def law(judge: Judge) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of LENGTH tokens after PROMPT, of the two most probable tokens each."""
    return enumerate_distribution(judge.engine, PROMPT, SamplingParams(temperature=1.0, top_k=2), LENGTH)


@pytest.fixture(params=RULES)
def drawn(request: pytest.FixtureRequest, draft: Path) -> Iterator[Counter[tuple[int, ...]]]:
    """How often each sequence was drawn. Without a seed, `auto` is the rule `block`; `rejection` verifies trees of
    siblings that were drawn without replacement.
    """
    rule: Any = "rejection" if request.param == "drawn trees" else request.param
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    tree = 6 if request.param == "drawn trees" else None
    with load(str(draft), draft_max=2, draft_tree=tree, acceptance=rule, ctx=256) as model:
        for i in range(SAMPLES):
            seed = None if rule == "auto" else i
            reply = model.generate(PROMPT, temperature=1.0, top_k=2, max_tokens=LENGTH + 1, seed=seed)
            found[reply.tokens[:LENGTH]] += 1
            accepted += reply.stats.accepted_tokens
    assert accepted > 0
    return found


def test_three_tokens_follow_the_law(drawn: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    assert len(law) == 2**LENGTH and min(law.values()) * SAMPLES > 5  # or chi-square would not apply
    assert set(drawn) <= set(law)
    counts, p = [drawn[tokens] for tokens in law], np.array(list(law.values()))
    statistic, limit = chi_square(counts, p / p.sum(), RARE)
    print(f"\nchi-square {statistic:.1f}, limit {limit:.1f}")
    assert statistic < limit
    p, warmer = p / p.sum(), p**0.4 / (p**0.4).sum()
    assert SAMPLES * ((p - warmer) ** 2 / warmer).sum() > limit, "so many samples tell another law apart, on average"
