"""Heads on MLX that score frequent tokens alone: the same scores, where they suit the text, and the same answers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx import heads
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.heads.draft_vocabulary import ShortVocabulary, choose_frequent, take_rows
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.arrays import Logits
from edgespec.core.drafter import BlockSession
from tests.backends.head_sessions import Pair
from tests.backends.mlx_pairs import answer, attach, is_close
from tests.gguf_models import REPOSITORY, TARGET

HEADS = REPOSITORY / "tests" / "fixtures" / "heads"
COUNT, VOCABULARY = 1024, 4096


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load(TARGET, LoadOptions(context_size=256))


def shorten(head: MlxHead, ids: list[int]) -> ShortVocabulary:
    """These tokens suit texts of which less than half lies outside."""
    is_kept = np.isin(np.arange(VOCABULARY), ids)
    return ShortVocabulary(head.network.shorten(mx.array(ids)), is_kept, saved=0.5)


def follow(target: MlxModel, head: MlxHead, text: list[int]) -> Logits:
    """[n, V] all rows of a block, or those after the text and two more tokens."""
    pair = Pair(target, head, text)
    if isinstance(pair.draft, BlockSession):
        return pair.block()
    return np.stack([pair.read(), pair.step(9), pair.step(3000)])


@pytest.mark.parametrize("kind", ["mtp", "eagle", "dflash", "dspark", "medusa", "hydra"])
def test_scores_are_those_of_all_tokens(target: MlxModel, kind: str) -> None:
    head = attach(target, HEADS / f"{kind}-python-6m")
    frequent, rare = list(range(100, 116)), [5, *range(3000, 3015)]
    whole = {name: follow(target, head, text) for name, text in (("frequent", frequent), ("rare", rare))}
    head.network.short = short = shorten(head, choose_frequent(target.tokenizer, COUNT).tolist())
    assert not is_close(whole["frequent"], whole["rare"]) and np.isfinite(whole["rare"]).all()
    assert is_close(follow(target, head, rare), whole["rare"])
    found = follow(target, head, frequent)
    assert is_close(found[:, short.is_kept], whole["frequent"][:, short.is_kept])
    assert np.isneginf(found[:, ~short.is_kept]).all()


def test_answers_are_those_of_plain_decoding(target: MlxModel) -> None:
    """A rollout drafts only what is kept, and less is accepted where fewer tokens are kept."""
    head = attach(target, HEADS / "mtp-python-6m")
    prompts = ["def read_lines(path):\n"]
    plain, whole = answer(target, None, prompts=prompts), answer(target, head, prompts=prompts)
    head.network.short = short = shorten(head, list(range(400)))
    few = answer(target, head, prompts=prompts)
    assert plain.texts == whole.texts == few.texts
    assert few.tokens_per_round < whole.tokens_per_round
    pair = Pair(target, head, [20, 30, 40, 50])
    chain, _ = pair.rollout(4)
    assert short.is_kept[chain.tokens].all()


def test_a_short_vocabulary_beside_the_whole_one(target: MlxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    head = attach(target, HEADS / "mtp-python-6m")
    head.shorten()
    assert head.network.short is None, "the vocabulary is small"
    monkeypatch.setattr(heads, "_LEAST", VOCABULARY)
    for kind in ("mtp", "dflash", "medusa"):
        head = attach(target, HEADS / f"{kind}-python-6m")
        before = head.extra_bytes
        head.shorten()
        short = head.network.short
        assert short is not None and short.is_kept.sum() == COUNT and 0 < short.saved < 0.5
        assert head.extra_bytes - before == short.network.nbytes > 0


def test_frequent_tokens(target: MlxModel) -> None:
    tokenizer = target.tokenizer
    found = choose_frequent(tokenizer, COUNT).tolist()
    assert found == sorted(set(found)) and len(found) == COUNT
    spelled = {token for each in "az,.(" for token in tokenizer.encode(each, parse_special=False)}
    assert spelled <= set(found)


@pytest.mark.parametrize("mode", ["linear", "bias", "embedding", "quantized", "quantized embedding"])
def test_rows_of_an_output_matrix(mode: str) -> None:
    module = nn.Embedding(96, 64) if "embedding" in mode else nn.Linear(64, 96, bias="bias" in mode)
    if "quantized" in mode:
        module = module.to_quantized(32, 8)
    multiply = module.as_linear if "embedding" in mode else module
    ids, x = mx.array([3, 50, 95]), mx.random.normal((2, 64))
    taken, nbytes = take_rows(multiply, ids)
    assert mx.allclose(taken(x), multiply(x)[:, ids], atol=1e-4)
    assert 0 < nbytes < sum(each.nbytes for each in module.parameters().values())
    assert multiply(x).shape == (2, 96), "the module is left as it is"
    with pytest.raises(Unsupported, match="has no rows"):
        take_rows(nn.RMSNorm(4), ids)
