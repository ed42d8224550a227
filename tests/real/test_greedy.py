"""Greedy answers on llama.cpp are those of plain decoding with every drafter that runs on this model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import edgespec
from tests.real.texts import IS_NIGHTLY, Ask, Judge, list_asks, load

DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"draft_max": 4},
    "ngram in trees": {"draft": "ngram", "draft_max": 4, "draft_tree": 10},
    "suffix": {"draft_max": 4, "memory": True},
    "recycling": {"draft_max": 3, "draft_tree": 10},
    "lookahead:3,3,3": {"draft_max": 3, "draft_tree": 11},
    "layerskip:24": {"draft_max": 3},
    "qspec": {"draft_max": 3},
    "sparse:4,32": {"draft_max": 3},
    "qspec+sparse:4,32": {"draft_max": 3},
    "model": {"draft_max": 3},
    "model in trees": {"draft": "model", "draft_max": 3, "draft_tree": 8},
    "ngram+model": {"draft_max": 3},
    "ngram+recycling+sparse:4,32": {"draft_max": 3},
}
ASKS = list_asks()
SOME = (ASKS[3], ASKS[20], ASKS[50]) if IS_NIGHTLY else (ASKS[3], ASKS[50])


@pytest.fixture(scope="module")
def expect(plain: edgespec.Model) -> Callable[[Ask], tuple[int, ...]]:
    """What plain decoding answers, asked once for each prompt."""
    return cache(lambda ask: ask.ask(plain).tokens)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_drafter_does_not_change_the_text(
    judge: Judge, expect: Callable[[Ask], tuple[int, ...]], draft: Path, name: str
) -> None:
    arguments = {"draft": name, **DRAFTS[name]}
    arguments["draft"] = arguments["draft"].replace("model", str(draft))
    drafted = 0
    with load(**arguments) as model:
        for i, ask in enumerate((*SOME, *ASKS)):
            if i >= len(SOME) and drafted > 0:  # lookups draft where a token comes again: not in every short answer
                break
            reply = ask.ask(model)
            judge.require_same(ask, expect(ask), reply.tokens)
            drafted += reply.stats.drafted_tokens
    assert drafted > 0


@pytest.mark.parametrize("arguments", [{"draft": "auto"}, {"draft": "ngram+suffix", "memory": True}], ids=str)
def test_the_autopilot_does_not_change_a_text(
    judge: Judge, expect: Callable[[Ask], tuple[int, ...]], arguments: dict[str, Any]
) -> None:
    with load(**arguments) as model:
        for ask in ASKS if IS_NIGHTLY else ASKS[::5]:
            judge.require_same(ask, expect(ask), ask.ask(model).tokens)
