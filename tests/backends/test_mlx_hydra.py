"""Hydra and Hydra++ heads on MLX: the forward pass, sessions in step with their target, files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.head_session import HeadSession
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.errors import InvalidModelFile
from tests.backends.medusa_heads import make_hydra, pickle_head, read_arrays, rewrite, run_hydra
from tests.backends.mlx_pairs import (
    Pair,
    attach,
    is_close,
    make_tokens,
    read_spec,
    refuse,
    tapped_features,
)
from tests.mlx_models import load_target

SIZE, VOCABULARY = 256, 4096
WHOLE = 10**6  # a window that no text fills
PREFIX = "prefix_embeding_layer."


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module", params=[True, False], ids=["Hydra++", "Hydra"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hydra") / "head"
    return make_hydra(path, size=SIZE, vocab_size=VOCABULARY, has_prefix=request.param)


@pytest.fixture
def plus_folder(tmp_path: Path) -> Path:
    return make_hydra(tmp_path / "plus", size=SIZE, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def head(target: MlxModel, folder: Path) -> MlxHead:
    found = attach(target, folder)
    assert found.name == "hydra"
    return found


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_the_forward_pass_is_that_of_numpy(target: MlxModel, has_prefix: bool, blocks: int, tmp_path: Path) -> None:
    folder = make_hydra(tmp_path / "h", size=SIZE, vocab_size=VOCABULARY, blocks=blocks, has_prefix=has_prefix)
    pair = Pair(target, attach(target, folder), make_tokens(20))
    assert isinstance(pair.draft, HeadSession)
    states = tapped_features(target, read_spec(folder), pair.text)
    embeddings = np.array(target.network.model.embed_tokens(mx.arange(VOCABULARY))).astype(np.float64)
    arrays, root = read_arrays(folder), pair.text[-1]
    found = [pair.read(), pair.step(9), pair.step(30)]
    for row, drafted in zip(found, ([], [9], [9, 30]), strict=True):
        assert row.dtype == np.float32
        assert is_close(row, run_hydra(arrays, embeddings, states, [root, *drafted]))
    assert pair.draft.step(5) is None
    assert not is_close(found[2], run_hydra(arrays, embeddings, states, [root, 30, 9])), "nothing was tested"
    assert is_close(found[0], run_hydra(arrays, embeddings, states[1:], [root])) != has_prefix, "it reads all states"


def test_pickled_heads_are_the_same(target: MlxModel, head: MlxHead, folder: Path, tmp_path: Path) -> None:
    pickled = attach(target, pickle_head(folder, tmp_path / "pickled", "hydra_lm_head.pt"))
    text = make_tokens(12)
    assert is_close(Pair(target, pickled, text).read(), Pair(target, head, text).read())


def test_the_output_matrix_may_be_the_targets(target: MlxModel, folder: Path, tmp_path: Path) -> None:
    outputs = dict.fromkeys(name for name in read_arrays(folder) if name.startswith("hydra_lm_head."))
    head = attach(target, rewrite(folder, tmp_path / "head", outputs))
    output = np.array(target.network.model.embed_tokens(mx.arange(VOCABULARY)))
    own = {name: output for name in outputs if name.endswith("weight")}
    written = attach(target, rewrite(folder, tmp_path / "own", {**outputs, **own}))
    text = make_tokens(12)
    assert is_close(Pair(target, head, text).read(), Pair(target, written, text).read())
    assert head.extra_bytes < written.extra_bytes


def test_the_config_says_how_the_prefix_layer_is_divided(target: MlxModel, plus_folder: Path, tmp_path: Path) -> None:
    """By itself it has the target's number of heads, as that of published heads, whose config says nothing."""
    text = make_tokens(12)
    found = []
    for heads in (4, 2):
        folder = rewrite(plus_folder, tmp_path / str(heads), {})
        config = {"hydra_num_heads": 3, "hidden_size": SIZE, "num_attention_heads": heads, "head_dim": SIZE // heads}
        config |= {"num_key_value_heads": heads // 2}
        (folder / "config.json").write_text(json.dumps(config))
        found.append(Pair(target, attach(target, folder), text).read())
    plain = Pair(target, attach(target, plus_folder), text).read()
    assert is_close(plain, found[0])
    assert not is_close(plain, found[1])


WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("an absent head", "lacks blocks", {"hydra_mlp.1.1.linear.weight": None, "hydra_mlp.1.3.linear.weight": None}),
    ("a head that reads no token", "has the shape", {"hydra_mlp.1.1.linear.weight": np.zeros((SIZE, SIZE), "f4")}),
    ("no residual matrix", "lacks blocks", {"hydra_mlp.2.1.res_connection.weight": None}),
    ("a further block", "has the shape", {"hydra_mlp.0.3.linear.weight": np.zeros((SIZE, 8), "f4")}),
    ("no norm", "lacks the tensor prefix_embeding_layer.norm.weight", {f"{PREFIX}norm.weight": None}),
    ("queries", "has the shape", {f"{PREFIX}layers.0.self_attn.q_proj.weight": np.zeros((SIZE, 8), "f4")}),
    ("keys", "has the shape", {f"{PREFIX}layers.0.self_attn.k_proj.weight": np.zeros((100, SIZE), "f4")}),
    ("a flat matrix", "has the shape", {f"{PREFIX}layers.0.mlp.up_proj.weight": np.zeros(SIZE, "f4")}),
    ("a flat gate", "has the shape", {f"{PREFIX}layers.0.mlp.gate_proj.weight": np.zeros(SIZE, "f4")}),
    ("a vocabulary", "4,000 tokens; the model has 4,096", {"hydra_lm_head.1.1.weight": np.zeros((4000, SIZE), "f4")}),
]


@pytest.mark.parametrize(("message", "change"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG])
def test_files_that_do_not_fit(
    target: MlxModel, plus_folder: Path, tmp_path: Path, message: str, change: dict[str, Any]
) -> None:
    refuse(target, rewrite(plus_folder, tmp_path / "head", change), (InvalidModelFile, Unsupported), message)


def test_heads_of_another_size(target: MlxModel, tmp_path: Path) -> None:
    folder = make_hydra(tmp_path / "head", size=128, vocab_size=VOCABULARY)
    refuse(target, folder, Unsupported, "hidden size of 128; the model has 256")
