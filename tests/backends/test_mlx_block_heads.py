"""DFlash, DSpark, Medusa and Hydra heads on MLX: random weights against numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.llamacpp.hidden_states import Floats
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.core.arrays import Logits
from edgespec.errors import BackendError
from tests.backends.head_sessions import Pair, check_fresh
from tests.backends.medusa_heads import (
    make_hydra,
    make_medusa,
    pickle_head,
    read_arrays,
    rewrite,
    run_hydra,
    run_medusa,
)
from tests.backends.mlx_dflash_heads import NumpyHead, make_folder
from tests.backends.mlx_pairs import attach, is_close, make_tokens, read_spec, tapped_features
from tests.mlx_models import load_target

LAYERS = (1, 3, 6)
SIZE, VOCABULARY = 256, 4096


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module")
def embeddings(target: MlxModel) -> Floats:
    """[V, H], which serve as the output matrix too."""
    found: Floats = np.array(target.network.model.embed_tokens(mx.arange(VOCABULARY))).astype(np.float64)
    return found


def make(path: Path, kind: str = "dflash", **settings: Any) -> Path:
    return make_folder(path, kind, **{"size": SIZE, "layers": LAYERS, "vocab_size": VOCABULARY, **settings})


def check_block(target: MlxModel, folder: Path, reference: NumpyHead) -> Any:
    """[block - 1, V] of a DFlash head, which are those of `reference`."""
    pair = Pair(target, attach(target, folder), make_tokens(20))
    features = tapped_features(target, read_spec(folder), pair.text)
    rows = pair.block()
    assert len(rows) == pair.draft.block_size == 5, "the first row of a block predicts nothing"
    expected = reference.scores(reference.output(features, pair.text[-1]))
    assert is_close(rows, expected[1:])
    assert not is_close(rows, expected[:-1]), "nothing was tested"
    assert is_close(pair.block(n=2), rows[:2])
    return rows


WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
EVERYWHERE = {"mask_token_id": 3, "target_layer_ids": [0, 2, 5], "use_swa": True, "swa_window_size": 8}


@pytest.mark.parametrize(
    ("config", "windows", "is_causal"),
    [
        ({}, (None, None), (False, False)),
        ({"is_causal": True}, (None, None), (True, True)),
        (WINDOWS, (9, None), (True, False)),
        ({**WINDOWS, "is_causal": False}, (9, None), (False, False)),
        ({**WINDOWS, "use_sliding_window": False}, (None, None), (True, False)),
        ({"sliding_window": 9}, (None, None), (False, False)),
        ({"dflash_config": EVERYWHERE}, (8, 8), (False, False)),
    ],
    ids=str,
)
def test_dflash(
    target: MlxModel,
    config: dict[str, Any],
    windows: tuple[int | None, ...],
    is_causal: tuple[bool, ...],
    tmp_path: Path,
) -> None:
    folder = make(tmp_path / "head", config=config)
    check_block(target, folder, NumpyHead(folder, target, windows, is_causal))


def test_quantized_dflash(target: MlxModel, tmp_path: Path) -> None:
    """As MLX writes matrices, with scales and biases beside the weights."""
    rounded: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    for name, weight in mx.load(str(make(tmp_path / "plain") / "model.safetensors")).items():
        if weight.ndim == 2:
            parts = mx.quantize(weight, group_size=32, bits=8)
            rounded[name] = mx.dequantize(*parts, group_size=32, bits=8)
            packed |= dict(zip((name, *(name.replace("weight", x) for x in ("scales", "biases"))), parts, strict=True))
    reference = NumpyHead(make(tmp_path / "rounded", tensors=rounded), target)
    check_block(target, make(tmp_path / "packed", tensors=packed), reference)


def follow(pair: Pair, tokens: list[int]) -> list[Logits | None]:
    """What the head says after the text, and after each of `tokens`."""
    return [pair.read(), *map(pair.draft.step, tokens)]


@pytest.mark.parametrize(
    ("config", "first"),
    [
        ({}, 0),
        ({"sample_from_anchor": False}, 1),
        ({"dflash_config": {"mask_token_id": 3}, "aux_hidden_state_layer_ids": [*LAYERS]}, 1),
    ],
    ids=str,
)
def test_dspark(target: MlxModel, config: dict[str, Any], first: int, tmp_path: Path) -> None:
    folder = make(tmp_path / "head", "dspark", config=config)
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


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_reduced_vocabulary(target: MlxModel, kind: str, tmp_path: Path) -> None:
    """Rows of the output matrix, and of DSpark's bias, are those of the draft's tokens."""
    ids = np.sort(np.random.default_rng(5).permutation(VOCABULARY)[:300])
    whole = make(tmp_path / "whole", kind)
    tensors = {
        "d2t": mx.array(ids - np.arange(300)),
        "lm_head.weight": target.network.model.embed_tokens(mx.array(ids)),
        "t2d": mx.zeros(VOCABULARY, mx.bool_),
    }
    if kind == "dspark":
        name = "markov_head.markov_w2.weight"
        tensors[name] = mx.load(str(whole / "model.safetensors"))[name][mx.array(ids)]
    reduced = make(tmp_path / "reduced", kind, tensors=tensors)
    pairs = [Pair(target, attach(target, folder), make_tokens(20)) for folder in (reduced, whole)]
    found, all_tokens = (np.asarray(each.block() if kind == "dflash" else follow(each, [50, 7])) for each in pairs)
    expected = np.full(all_tokens.shape, -np.inf)
    expected[:, ids] = all_tokens[:, ids]
    assert is_close(found, expected)


def test_a_failed_read_is_done_again(target: MlxModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = attach(target, make(tmp_path / "head"))
    pair = Pair(target, head, make_tokens(40))

    def fail(z: Any, cache: Any) -> None:
        raise RuntimeError("broken on purpose")

    network: Any = head.network
    with monkeypatch.context() as patch:
        patch.setattr(network._layers[1], "inject", fail)
        with pytest.raises(BackendError, match="broken on purpose"):
            pair.block()
    check_fresh(pair)


@pytest.mark.parametrize(("blocks", "own"), [(1, (0, 1, 2)), (2, (0, 1, 2)), (1, ()), (2, (1,))], ids=str)
def test_medusa(target: MlxModel, embeddings: Floats, blocks: int, own: tuple[int, ...], tmp_path: Path) -> None:
    """Of heads with their own output matrix and the target's, from the state of the token before the root."""
    folder = make_medusa(tmp_path / "head", size=SIZE, vocab_size=VOCABULARY, blocks=blocks, own=own)
    pair = Pair(target, attach(target, folder), make_tokens(20))
    states = tapped_features(target, read_spec(folder), pair.text)
    rows = pair.block()
    assert is_close(rows, run_medusa(read_arrays(folder), embeddings, states[18]))
    assert not is_close(rows, run_medusa(read_arrays(folder), embeddings, states[17])), "nothing was tested"
    assert is_close(pair.block(n=1), rows[:1])
    assert all(row.dtype == np.float32 for row in rows)


def test_a_block_has_as_many_positions_as_there_are_heads_in_the_file(target: MlxModel, tmp_path: Path) -> None:
    """The config of published heads says 2 where the file has 5."""
    folder = make_medusa(tmp_path / "head", size=SIZE, vocab_size=VOCABULARY, heads=5, own=())
    pair = Pair(target, attach(target, folder), make_tokens(9))
    assert pair.draft.block_size == len(pair.block(n=9)) == 5


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_hydra(target: MlxModel, embeddings: Floats, has_prefix: bool, blocks: int, tmp_path: Path) -> None:
    folder = make_hydra(tmp_path / "h", size=SIZE, vocab_size=VOCABULARY, blocks=blocks, has_prefix=has_prefix)
    pair = Pair(target, attach(target, folder), make_tokens(20))
    states, arrays, root = tapped_features(target, read_spec(folder), pair.text), read_arrays(folder), pair.text[-1]
    found = [pair.read(), pair.step(9), pair.step(30)]
    for row, drafted in zip(found, ([], [9], [9, 30]), strict=True):
        assert row.dtype == np.float32
        assert is_close(row, run_hydra(arrays, embeddings, states, [root, *drafted]))
    assert pair.draft.step(5) is None
    assert not is_close(found[2], run_hydra(arrays, embeddings, states, [root, 30, 9])), "nothing was tested"
    assert is_close(found[0], run_hydra(arrays, embeddings, states[1:], [root])) != has_prefix, "it reads all states"


def say(target: MlxModel, head: MlxHead) -> Any:
    return Pair(target, head, make_tokens(12)).say([9, 30])


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_other_files_of_the_same_heads(target: MlxModel, kind: str, tmp_path: Path) -> None:
    """Pickled, with prefixed names, and with the target's output matrix."""
    folder = (make_medusa if kind == "medusa" else make_hydra)(tmp_path / kind, size=SIZE, vocab_size=VOCABULARY)
    head = attach(target, folder)
    assert head.name == kind
    expected = say(target, head)
    pickled = attach(target, pickle_head(folder, tmp_path / "pickled", f"{kind}_lm_head.pt"))
    assert is_close(say(target, pickled), expected) and pickled.extra_bytes == head.extra_bytes
    arrays = {name: array.astype(np.float32) for name, array in read_arrays(folder).items()}
    for prefix in ("medusa_head.", "medusa_heads.") if kind == "medusa" else ():
        change: dict[str, Any] = {**dict.fromkeys(arrays), **{prefix + name: each for name, each in arrays.items()}}
        assert is_close(say(target, attach(target, rewrite(folder, tmp_path / prefix[:-1], change))), expected)
    if kind == "hydra":
        outputs = dict.fromkeys(name for name in arrays if name.startswith("hydra_lm_head."))
        without = attach(target, rewrite(folder, tmp_path / "without", outputs))
        output = np.array(target.network.model.embed_tokens(mx.arange(VOCABULARY)))
        own = {**outputs, **{name: output for name in outputs if name.endswith("weight")}}
        written = attach(target, rewrite(folder, tmp_path / "own", own))
        assert is_close(say(target, without), say(target, written)) and without.extra_bytes < written.extra_bytes


def test_the_config_says_how_the_prefix_layer_is_divided(target: MlxModel, tmp_path: Path) -> None:
    """By itself it has the target's number of heads, as that of published heads, whose config says nothing."""
    source, found = make_hydra(tmp_path / "plus", size=SIZE, vocab_size=VOCABULARY), []
    for heads in (4, 2):
        folder = rewrite(source, tmp_path / str(heads), {})
        config = {"hydra_num_heads": 3, "hidden_size": SIZE, "num_attention_heads": heads, "head_dim": SIZE // heads}
        (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": heads // 2}))
        found.append(say(target, attach(target, folder)))
    plain = say(target, attach(target, source))
    assert is_close(plain, found[0])
    assert not is_close(plain, found[1])
