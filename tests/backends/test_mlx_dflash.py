"""DFlash heads on MLX: the forward pass, and sessions in step with their target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.core.protocols import Draft
from edgespec.errors import BackendError, EdgespecError, InvalidModelFile
from tests.backends.mlx_dflash_heads import NumpyHead, make_folder
from tests.backends.mlx_pairs import (
    Pair,
    attach,
    check_fresh,
    is_close,
    make_tokens,
    read_spec,
    refuse,
    tapped_features,
)
from tests.mlx_models import load_target

LAYERS = (1, 3, 6)


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


def make(path: Path, target: MlxModel, **settings: Any) -> Path:
    return make_folder(path, **{"size": 256, "layers": LAYERS, "vocab_size": target.tokenizer.vocab_size, **settings})


@pytest.fixture(scope="module")
def head(target: MlxModel, tmp_path_factory: pytest.TempPathFactory) -> MlxHead:
    folder = make(tmp_path_factory.mktemp("dflash") / "head", target)
    return attach(target, folder)


@pytest.mark.parametrize(
    ("config", "windows", "is_causal"),
    [
        ({}, (None, None), False),
        ({"is_causal": True}, (None, None), True),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (9, None),
            False,
        ),
        ({"sliding_window": 9}, (None, None), False),
    ],
    ids=str,
)
def test_the_forward_pass_is_that_of_numpy(
    target: MlxModel, config: dict[str, Any], windows: tuple[int | None, ...], is_causal: bool, tmp_path: Path
) -> None:
    folder = make(tmp_path / "head", target, config=config)
    pair = Pair(target, attach(target, folder), make_tokens(20))
    reference = NumpyHead(folder, target, windows, is_causal)
    features = tapped_features(target, read_spec(folder), pair.text)
    rows = pair.block()
    assert len(rows) == 5, "the first row of a block predicts nothing"
    expected = reference.scores(reference.output(features, pair.text[-1]))
    assert is_close(rows, expected[1:])
    assert not is_close(rows, expected[:-1]), "nothing was tested"


def test_a_window_over_all_layers(target: MlxModel, tmp_path: Path) -> None:
    table = {"mask_token_id": 3, "target_layer_ids": [0, 2, 5], "use_swa": True, "swa_window_size": 8}
    folder = make(tmp_path / "head", target, config={"dflash_config": table})
    pair = Pair(target, attach(target, folder), make_tokens(20))
    features = tapped_features(target, read_spec(folder), pair.text)
    reference = NumpyHead(folder, target, (8, 8))
    assert is_close(pair.block(), reference.scores(reference.output(features, pair.text[-1]))[1:])


def test_a_reduced_vocabulary(target: MlxModel, tmp_path: Path) -> None:
    ids = np.sort(np.random.default_rng(5).permutation(4096)[:300])
    rows = np.random.default_rng(6).standard_normal((300, 256)).astype(np.float32) / 16
    tensors = {"d2t": mx.array(ids - np.arange(300)), "lm_head.weight": mx.array(rows)}
    folder = make(tmp_path / "head", target, tensors=tensors)
    pair = Pair(target, attach(target, folder), make_tokens(20))
    reference = NumpyHead(folder, target)
    expected = np.full((5, 4096), -np.inf)
    output = reference.output(tapped_features(target, read_spec(folder), pair.text), pair.text[-1])
    expected[:, ids] = reference.scores(output)[1:]
    assert is_close(pair.block(), expected)


def test_quantized_matrices(target: MlxModel, tmp_path: Path) -> None:
    """As MLX writes them, with scales and biases beside the weights."""
    plain = make(tmp_path / "plain", target)
    rounded: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    for name, weight in mx.load(str(plain / "model.safetensors")).items():
        if weight.ndim == 2:
            parts = mx.quantize(weight, group_size=32, bits=8)
            rounded[name] = mx.dequantize(*parts, group_size=32, bits=8)
            packed |= dict(zip((name, *(name.replace("weight", x) for x in ("scales", "biases"))), parts, strict=True))
    folder = make(tmp_path / "packed", target, tensors=packed)
    pair = Pair(target, attach(target, folder), make_tokens(20))
    reference = NumpyHead(make(tmp_path / "rounded", target, tensors=rounded), target)
    features = tapped_features(target, read_spec(folder), pair.text)
    assert is_close(pair.block(), reference.scores(reference.output(features, pair.text[-1]))[1:])


def test_fewer_tokens_are_the_first_ones(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(20))
    rows = pair.block()
    assert pair.draft.block_size == len(rows) == 5
    assert is_close(pair.block(n=2), rows[:2])
    pair = Pair(target, head, make_tokens(60))
    assert is_close(pair.block(window=1), pair.fresh().block(window=2))


def test_a_failed_read_is_done_again(target: MlxModel, head: MlxHead, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(target, head, make_tokens(40))

    def fail(z: Any, cache: Any) -> None:
        raise RuntimeError("broken on purpose")

    network: Any = head.network
    with monkeypatch.context() as patch:
        patch.setattr(network._layers[1], "inject", fail)
        with pytest.raises(BackendError, match="broken on purpose"):
            pair.block()
    check_fresh(pair)


def test_a_closed_session_leaves_its_target_without_a_tap(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(8))
    pair.draft.close()
    pair.session.forward(pair.text[-1], Draft.chain([5]))
    pair.session.commit((0,))
    assert pair.session.position == 9


def test_heads_that_do_not_fit(target: MlxModel, tmp_path: Path) -> None:
    def check(error: type[EdgespecError], message: str, settings: dict[str, Any], **spec: Any) -> None:
        folder = make(tmp_path / str(len(list(tmp_path.iterdir()))), target, **settings)
        refuse(target, folder, error, message, **spec)

    o_proj = "layers.1.self_attn.o_proj.weight"
    check(Unsupported, "hidden size of 512; the model has 256", {}, hidden_size=512)
    check(Unsupported, "fills its blocks with a token of the model, and its file names none", {}, mask_token=None)
    check(Unsupported, "names 4,096 of 4,096", {}, mask_token=4096)
    check(Unsupported, "blocks of 1 positions", {"n_rows": 1})
    check(Unsupported, "blocks of 65 positions", {"n_rows": 65})
    check(Unsupported, "hidden_act = gelu", {"config": {"hidden_act": "gelu"}})
    check(
        Unsupported, "scores 300 tokens and does not name them", {"tensors": {"lm_head.weight": mx.zeros((300, 256))}}
    )
    check(Unsupported, "scores 4,096 tokens and does not name them", {"tensors": {"d2t": mx.zeros(300, mx.int64)}})
    check(InvalidModelFile, "lacks the tensor hidden_norm.weight", {"tensors": {"hidden_norm.weight": None}})
    check(InvalidModelFile, "has the shape", {"tensors": {o_proj: mx.zeros((256, 64))}})
    check(
        InvalidModelFile,
        "selector_hidden.weight, which is not run",
        {"tensors": {"selector_hidden.weight": mx.ones(2)}},
    )
    check(InvalidModelFile, "has 2 layers, its config.json names 3", {"config": {"num_hidden_layers": 3}})
    swa = {"use_sliding_window": True, "sliding_window": 9}
    check(InvalidModelFile, "a window and not a type for each layer", {"config": swa})
    check(InvalidModelFile, "describes no layer", {"config": {"num_attention_heads": "4"}})
    folder = make(tmp_path / "deep", target, layers=(1, 3, 9))
    with pytest.raises(Unsupported, match="reads layers 1, 3, 9, and the model has 6"):
        attach(target, folder).open_session(target.open_session(), lambda: None)
