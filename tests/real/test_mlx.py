"""The real model on MLX: from the package's GGUF file, and from a folder that the laboratory makes of it.

The folder's weights are floats, which MLX multiplies ten times as fast on a CPU as quantized ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgespec
from laboratory.cost_faithful import build
from laboratory.embedding.shapes import OWN
from tests.real.texts import ANSWER, IS_NIGHTLY, Ask, Judge, load

DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"draft_max": 3, "draft_tree": 6},
    "recycling": {"draft_max": 3, "draft_tree": 6},
    "lookahead:2,3,2": {"draft_max": 2, "draft_tree": 7},
    "layerskip:24": {"draft_max": 2},
    "sparse:4,16": {"draft_max": 2},
}
ASKS = (Ask("hello", True, 10), Ask("one, two, three, one, two, three, one,", False, 12), Ask("What is DNA?", True, 10))


@pytest.fixture(scope="module")
def folder(weights: Path, folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mlx") / "smollm2"
    build(weights, path, OWN, "F16")
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[Ask, edgespec.Reply]:
    with load("none", str(folder), backend="mlx", threads=None) as model:
        return {ask: ask.ask(model) for ask in ASKS}


def test_both_runtimes_give_one_text(expected: dict[Ask, edgespec.Reply], plain: edgespec.Model, judge: Judge) -> None:
    """But at near-ties on llama.cpp, which rounds activations to 8 bits."""
    assert expected[ASKS[0]].text == ANSWER
    for ask, reply in expected.items():
        other = ask.ask(plain)
        assert reply.stats.prompt_tokens == other.stats.prompt_tokens
        judge.require_same(ask, other.tokens, reply.tokens)


@pytest.mark.parametrize("name", DRAFTS if IS_NIGHTLY else ("ngram",))
def test_a_drafter_does_not_change_the_text(folder: Path, expected: dict[Ask, edgespec.Reply], name: str) -> None:
    drafted = 0
    with load(name, str(folder), backend="mlx", threads=None, **DRAFTS[name]) as model:
        for ask, plain in expected.items():
            reply = ask.ask(model)
            assert reply.tokens == plain.tokens
            drafted += reply.stats.drafted_tokens
    assert drafted > 0


def test_the_file_of_the_package() -> None:
    """Its matrices stay as they are, of 4 and 8 bits."""
    with load("ngram", backend="mlx", threads=None, draft_max=3) as model:
        assert model.info.backend == "mlx"
        assert model.chat("hello", temperature=0, max_tokens=3).text == "Hello! How"
