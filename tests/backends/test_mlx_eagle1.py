"""EAGLE-1 and EAGLE-2 heads on MLX: the forward pass, and a trained head's acceptance. Sessions: test_mlx_pairs.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.context import Floats
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.errors import EdgespecError, InvalidModelFile
from edgespec.formats.mlx_folder import read_json
from tests.backends.mlx_pairs import (
    Answers,
    answer,
    attach,
    check_forward,
    check_trees,
    measure,
    open_late,
    read_spec,
    refuse,
)
from tests.backends.pair_heads import LLAMA, Look, NumpyHead, make_config, make_tensors, quantize, write_folder
from tests.formats.head_files import make_pickle, stored, write_torch
from tests.mlx_models import load_target
from tests.models import REPOSITORY

FOLDER = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle-python-6m"
SIZE, VOCABULARY = 256, 4096


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module")
def embeddings(target: MlxModel) -> Floats:
    """[V, H], which serve as the output matrix too."""
    found: Floats = np.array(target.network.model.embed_tokens(mx.arange(VOCABULARY)))
    return found


def write_head(path: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    known = {name: each for name, each in tensors.items() if each is not None}
    return write_folder(path, known, make_config("eagle", SIZE, VOCABULARY) | (config or {}))


@pytest.mark.parametrize("look", [LLAMA, Look(is_biased=True), Look(n_layers=2), Look(is_normed=True)], ids=str)
def test_the_forward_pass_is_that_of_numpy(target: MlxModel, embeddings: Floats, look: Look, tmp_path: Path) -> None:
    tensors = make_tensors("eagle", SIZE, look)
    folder = write_head(tmp_path / "head", tensors)
    spec = read_spec(folder)
    assert (spec.kind, spec.layers, spec.in_target) == ("eagle", (), False)
    head = target.load_head(spec, folder)
    assert head.extra_bytes == sum(each.nbytes for each in tensors.values())
    check_forward(target, head, NumpyHead(tensors, look, embeddings, embeddings), spec)


def test_embeddings_and_output_of_its_own(target: MlxModel, tmp_path: Path) -> None:
    rng, tensors = np.random.default_rng(5), make_tensors("eagle", SIZE, LLAMA)
    own = rng.standard_normal((2, VOCABULARY, SIZE), np.float32) / 16
    folder = write_head(tmp_path / "head", {**tensors, "embed_tokens.weight": own[0], "lm_head.weight": own[1]})
    spec = read_spec(folder)
    check_forward(target, target.load_head(spec, folder), NumpyHead(tensors, LLAMA, own[0], own[1]), spec)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_heads(target: MlxModel, embeddings: Floats, bits: int, tmp_path: Path) -> None:
    whole = write_head(tmp_path / "whole", make_tensors("eagle", SIZE, LLAMA))
    values = quantize(tmp_path / "low", whole, bits)
    spec = read_spec(tmp_path / "low")
    assert spec == read_spec(whole)
    head = target.load_head(spec, tmp_path / "low")
    assert head.extra_bytes < target.load_head(spec, whole).extra_bytes / 2
    check_forward(target, head, NumpyHead(values, LLAMA, embeddings, embeddings), spec)


def test_pickled_heads(target: MlxModel, embeddings: Floats, tmp_path: Path) -> None:
    tensors = make_tensors("eagle", SIZE, LLAMA)
    tmp_path.joinpath("config.json").write_text(json.dumps(make_config("eagle", SIZE, VOCABULARY)))
    state, data = {}, {}
    for name, each in tensors.items():
        strides = (each.shape[1], 1) if each.ndim == 2 else (1,)
        state[name] = stored("FloatStorage", str(len(state)), each.size, each.shape, strides)
        data[str(len(data))] = each.tobytes()
    write_torch(tmp_path / "pytorch_model.bin", make_pickle(state), data)
    spec = read_spec(tmp_path)
    check_forward(target, target.load_head(spec, tmp_path), NumpyHead(tensors, LLAMA, embeddings, embeddings), spec)


@pytest.fixture(scope="module")
def plain(target: MlxModel) -> Answers:
    return answer(target, None)


@pytest.fixture(scope="module")
def trained(target: MlxModel) -> MlxHead:
    return attach(target, FOLDER)


@pytest.fixture(scope="module")
def rate(target: MlxModel, trained: MlxHead, plain: Answers) -> float:
    return measure(target, trained, plain)


def test_a_trained_head_is_accepted(target: MlxModel, trained: MlxHead, plain: Answers, rate: float) -> None:
    assert rate > 0.6
    check_trees(target, trained, plain)


def test_wrong_readings_are_accepted_less(
    target: MlxModel, trained: MlxHead, plain: Answers, rate: float, tmp_path: Path
) -> None:
    """And the text does not change, which `measure` checks."""
    assert measure(target, MlxHead("eagle", trained.network, open_late, trained.tokenizer), plain) < rate - 0.1
    before_norm = attach(target, FOLDER, layers=(6,))
    assert measure(target, before_norm, plain) < rate - 0.1
    tensors = load_file(FOLDER / "model.safetensors")
    swapped = np.ascontiguousarray(np.roll(tensors["fc.weight"], SIZE, axis=1))
    folder = write_head(tmp_path / "swapped", {**tensors, "fc.weight": swapped}, read_json(FOLDER / "config.json"))
    assert measure(target, attach(target, folder), plain, n_prompts=1) < 0.1


def test_heads_that_do_not_fit(target: MlxModel, tmp_path: Path) -> None:
    def check(error: type[EdgespecError], message: str, changes: dict[str, Any], **config: Any) -> None:
        tensors = {**make_tensors("eagle", SIZE, LLAMA), **changes}
        folder = write_head(tmp_path / str(len(list(tmp_path.iterdir()))), tensors, config)
        refuse(target, folder, error, message)

    wide = np.zeros((512, 256), np.float32)
    check(InvalidModelFile, "lacks the tensor layers.0.mlp.up_proj.weight", {"layers.0.mlp.up_proj.weight": None})
    check(InvalidModelFile, r"tensor 0.o has the shape \(512, 256\)", {"layers.0.self_attn.o_proj.weight": wide})
    check(InvalidModelFile, "tensor fc.bias has the shape", {"fc.bias": np.zeros(7, np.float32)})
    check(Unsupported, "vocabulary of 512 tokens; the model has 4,096", {"embed_tokens.weight": wide})
    check(InvalidModelFile, "its num_attention_heads is 0", {}, num_attention_heads=0)
    check(InvalidModelFile, "describes no layer", {}, rope_scaling={"type": "unheard"})
    check(InvalidModelFile, "not quantized as MLX does by default", {"fc.scales": np.zeros((256, 8), np.uint8)})
    small = write_folder(tmp_path / "small", make_tensors("eagle", 128, LLAMA), make_config("eagle", 128, VOCABULARY))
    refuse(target, small, Unsupported, "hidden size of 128; the model has 256")
