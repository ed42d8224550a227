"""DSpark heads on MLX: blocks whose tokens depend on the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.core.protocols import Budget
from edgespec.core.sampling import Logits
from edgespec.errors import EdgespecError, InvalidModelFile
from tests.backends.mlx_dflash_heads import NumpyHead, make_folder
from tests.backends.mlx_pairs import (
    WHOLE,
    Pair,
    answer,
    attach,
    is_close,
    make_tokens,
    measure,
    read_spec,
    refuse,
    tapped_features,
)
from tests.mlx_models import load_target
from tests.models import REPOSITORY

LAYERS = (1, 3, 6)
FOLDER = REPOSITORY / "tests" / "fixtures" / "heads" / "dspark-python-6m"


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


def make(path: Path, target: MlxModel, **settings: Any) -> Path:
    vocab_size = target.tokenizer.vocab_size
    return make_folder(path, "dspark", **{"size": 256, "layers": LAYERS, "vocab_size": vocab_size, **settings})


@pytest.fixture(scope="module")
def head(target: MlxModel, tmp_path_factory: pytest.TempPathFactory) -> MlxHead:
    folder = make(tmp_path_factory.mktemp("dspark") / "head", target)
    return attach(target, folder)


def follow(pair: Pair, tokens: list[int], window: int = WHOLE) -> list[Logits | None]:
    """What the head says after the text, and after each of `tokens`."""
    return [pair.draft.read(pair.text, window), *map(pair.draft.step, tokens)]


@pytest.mark.parametrize(
    ("config", "first"),
    [
        ({}, 0),
        ({"sample_from_anchor": False}, 1),
        ({"dflash_config": {"mask_token_id": 3}, "aux_hidden_state_layer_ids": [*LAYERS]}, 1),
    ],
    ids=str,
)
def test_the_forward_pass_is_that_of_numpy(
    target: MlxModel, config: dict[str, Any], first: int, tmp_path: Path
) -> None:
    folder = make(tmp_path / "head", target, config=config)
    pair = Pair(target, attach(target, folder), make_tokens(20))
    features = tapped_features(target, read_spec(folder), pair.text)
    reference = NumpyHead(folder, target)
    scores = reference.scores(reference.output(features, pair.text[-1]))
    chosen = make_tokens(6 - first, seed=4)
    found = follow(pair, chosen)
    assert found.pop() is None, "the block ends"
    tokens = [pair.text[-1], *chosen[:-1]]
    assert is_close(found, [row + reference.bias(token) for row, token in zip(scores[first:], tokens, strict=True)])
    assert not is_close(found, scores[first:]), "nothing was tested"


def test_a_reduced_vocabulary(target: MlxModel, head: MlxHead, tmp_path: Path) -> None:
    """Rows of the output matrix and of the bias are those of the draft's tokens."""
    ids = np.sort(np.random.default_rng(5).permutation(4096)[:300])
    weights = mx.load(str(make(tmp_path / "whole", target) / "model.safetensors"))
    rows = target.network.model.embed_tokens(mx.array(ids))
    tensors = {"d2t": mx.array(ids - np.arange(300)), "lm_head.weight": rows, "t2d": mx.zeros(4096, mx.bool_)}
    tensors["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][mx.array(ids)]
    folder = make(tmp_path / "reduced", target, tensors=tensors)
    reduced = Pair(target, attach(target, folder), make_tokens(20))
    found, whole = follow(reduced, [50, 7]), follow(Pair(target, head, reduced.text), [50, 7])
    expected = np.full((3, 4096), -np.inf)
    expected[:, ids] = np.asarray(whole)[:, ids]
    assert is_close(found, expected)


def test_heads_that_do_not_fit(target: MlxModel, tmp_path: Path) -> None:
    def check(error: type[EdgespecError], message: str, **settings: Any) -> None:
        folder = make(tmp_path / str(len(list(tmp_path.iterdir()))), target, **settings)
        refuse(target, folder, error, message)

    check(Unsupported, "markov_head_type = gated", config={"markov_head_type": "gated"})
    for name in ("1", "2"):
        check(InvalidModelFile, "lacks its Markov head", tensors={f"markov_head.markov_w{name}.weight": None})
        wrong = {f"markov_head.markov_w{name}.weight": mx.zeros((4000, 8))}
        check(InvalidModelFile, rf"markov_{name} has the shape \(4000, 8\), not \(4096, 8\)", tensors=wrong)


def test_a_trained_head_is_accepted(target: MlxModel) -> None:
    """Less of it where the first row is not read; the text stays the same."""
    plain, budget = answer(target, None), Budget(8, 8)
    rate = measure(target, attach(target, FOLDER), plain, budget)
    assert rate > 0.3
    assert measure(target, attach(target, FOLDER, predicts_at_root=False), plain, budget) < rate - 0.03
