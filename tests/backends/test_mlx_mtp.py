"""MTP layers on MLX: the forward pass, norms as files hold them, layers in the target's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.context import Floats
from edgespec.backends.mlx import head_networks
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.errors import EdgespecError, InvalidModelFile
from tests.backends.mlx_pairs import (
    Answers,
    Pair,
    answer,
    attach,
    check_forward,
    check_fresh,
    check_trees,
    make_tokens,
    measure,
    open_late,
    read_spec,
    refuse,
)
from tests.backends.pair_heads import (
    FFN,
    LLAMA,
    MIXTURE,
    QWEN,
    Look,
    NumpyHead,
    make_config,
    make_tensors,
    quantize,
    stack_experts,
    write_folder,
)
from tests.mlx_models import CONFIGS, load_target, make_folder
from tests.models import REPOSITORY

FOLDER = REPOSITORY / "tests" / "fixtures" / "heads" / "mtp-python-6m"
SIZE, VOCABULARY = 256, 4096
LAYER = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module")
def embeddings(target: MlxModel) -> Floats:
    """[V, H], which serve as the output matrix too."""
    found: Floats = np.array(target.network.model.embed_tokens(mx.arange(VOCABULARY)))
    return found


def write_head(path: Path, tensors: dict[str, Any], look: Look = LLAMA) -> Path:
    known = {name: each for name, each in tensors.items() if each is not None}
    return write_folder(path, known, make_config("mtp", SIZE, VOCABULARY, look))


@pytest.mark.parametrize(
    "look",
    [LLAMA, Look(is_biased=True), QWEN, Look(is_deepseek=True), Look(is_deepseek=True, is_normed=True)],
    ids=str,
)
def test_the_forward_pass_is_that_of_numpy(target: MlxModel, embeddings: Floats, look: Look, tmp_path: Path) -> None:
    tensors = make_tensors("mtp", SIZE, look)
    folder = write_head(tmp_path / "head", tensors, look)
    spec = read_spec(folder)
    assert (spec.kind, spec.layers, spec.in_target, spec.feeds_normed) == ("mtp", (), False, True)
    head = target.load_head(spec, folder)
    assert head.extra_bytes == sum(each.nbytes for each in tensors.values())
    check_forward(target, head, NumpyHead(tensors, look, embeddings, embeddings), spec)


@pytest.mark.parametrize("layout", ["experts", "fused", "stacked", "quantized"])
def test_a_mixture_of_experts(target: MlxModel, embeddings: Floats, layout: str, tmp_path: Path) -> None:
    tensors = values = make_tensors("mtp", SIZE, MIXTURE)
    if layout != "experts":
        tensors = stack_experts(tensors, is_fused=layout == "fused")
    folder = write_head(tmp_path / "head", tensors, MIXTURE)
    if layout == "quantized":
        low = quantize(tmp_path / "low", folder, 8)
        folder, prefix = tmp_path / "low", "mtp.layers.0.mlp."
        values = {name: each for name, each in low.items() if "switch_mlp" not in name}
        for part in ("gate", "up", "down"):
            for i, each in enumerate(low[f"{prefix}switch_mlp.{part}_proj.weight"]):
                values[f"{prefix}experts.{i}.{part}_proj.weight"] = each
    spec = read_spec(folder)
    check_forward(target, target.load_head(spec, folder), NumpyHead(values, MIXTURE, embeddings, embeddings), spec)


@pytest.mark.parametrize(
    "stored",
    [
        (),
        LAYER,
        (*LAYER, "mtp.norm"),
        ("mtp.norm",),
        (*LAYER, "mtp.norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"),
    ],
    ids=len,
)
def test_norms_that_converters_have_changed(
    target: MlxModel, embeddings: Floats, stored: tuple[str, ...], tmp_path: Path
) -> None:
    """`stored` are in the file as they are, the others less 1."""
    tensors = make_tensors("mtp", SIZE, QWEN)
    changed = {name: each + (1 if any(f"{part}." in name for part in stored) else 0) for name, each in tensors.items()}
    folder = write_head(tmp_path / "head", changed, QWEN)
    spec = read_spec(folder)
    check_forward(target, target.load_head(spec, folder), NumpyHead(tensors, QWEN, embeddings, embeddings), spec)


@pytest.mark.parametrize("look", [QWEN, Look(is_deepseek=True)], ids=str)
def test_quantized_heads_and_names_without_a_prefix(
    target: MlxModel, embeddings: Floats, look: Look, tmp_path: Path
) -> None:
    tensors = make_tensors("mtp", SIZE, look)
    whole = write_head(tmp_path / "whole", {name.removeprefix("mtp."): each for name, each in tensors.items()}, look)
    values = quantize(tmp_path / "low", whole, 4)
    spec = read_spec(tmp_path / "low")
    assert spec == read_spec(whole)
    head = target.load_head(spec, tmp_path / "low")
    values = {name if look.is_deepseek else f"mtp.{name}": each for name, each in values.items()}
    check_forward(target, head, NumpyHead(values, look, embeddings, embeddings), spec)


def test_a_layer_in_the_folder_of_a_hybrid_target(tmp_path: Path) -> None:
    """mlx-lm does not load it. Rejected drafts are replayed there, and so are their features."""
    config = CONFIGS["hybrid"] | {"model_type": "qwen3_5", "num_experts": 0, "intermediate_size": FFN}
    rope = {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": QWEN.rotated, "type": "default"}}
    folder = make_folder(tmp_path / "target", config | rope)
    tensors = make_tensors("mtp", 64, QWEN)
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), {name: mx.array(each) for name, each in tensors.items()})
    spec = read_spec(folder)
    assert (spec.kind, spec.in_target, spec.hidden_size) == ("mtp", True, 64)
    target = load(folder, LoadOptions(context_size=256))
    head = target.load_head(spec, folder)
    assert head.extra_bytes == sum(each.nbytes for each in tensors.values())
    model = target.network.language_model
    embeddings, output = (np.array(each.weight) for each in (model.model.embed_tokens, model.lm_head))
    check_forward(target, head, NumpyHead(tensors, QWEN, embeddings, output), spec)
    pair = Pair(target, head, make_tokens(30))
    for accepted in (0, 2, 3, 1):
        pair.verify_chain([5, 9, 7], accepted, 11 + accepted)
        check_fresh(pair)
    found = answer(target, head)
    assert found.texts == answer(target, None).texts
    assert found.tested.total() > 20


@pytest.fixture(scope="module")
def plain(target: MlxModel) -> Answers:
    return answer(target, None)


@pytest.fixture(scope="module")
def trained(target: MlxModel) -> MlxHead:
    return attach(target, FOLDER)


@pytest.fixture(scope="module")
def rate(target: MlxModel, trained: MlxHead, plain: Answers) -> float:
    return measure(target, trained, plain)


def rewrite(path: Path, change: dict[str, Any]) -> Path:
    """A copy of the trained head with other tensors."""
    shutil.copytree(FOLDER, path)
    mx.save_safetensors(str(path / "model.safetensors"), {**mx.load(str(FOLDER / "model.safetensors")), **change})
    return path


def test_a_trained_head_is_accepted(target: MlxModel, trained: MlxHead, plain: Answers, rate: float) -> None:
    assert rate > 0.6
    check_trees(target, trained, plain)


def test_wrong_readings_are_accepted_less(
    target: MlxModel, trained: MlxHead, plain: Answers, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the text does not change, which `measure` checks."""
    assert measure(target, MlxHead("mtp", trained.network, open_late, trained.tokenizer), plain) < rate - 0.1
    weights = mx.load(str(FOLDER / "model.safetensors"))
    halves = mx.split(weights["mtp.fc.weight"], 2, axis=1)
    folder = rewrite(tmp_path / "swapped", {"mtp.fc.weight": mx.concatenate(halves[::-1], axis=1)})
    assert measure(target, attach(target, folder), plain, n_prompts=1) < 0.1
    folder = rewrite(tmp_path / "less", {name: each - 1 for name, each in weights.items() if "norm" in name})
    assert measure(target, attach(target, folder), plain) > rate - 0.05
    monkeypatch.setattr(head_networks, "_PLAIN_MEAN", -10.0)
    assert measure(target, attach(target, folder), plain, n_prompts=2) < rate - 0.3


@pytest.mark.parametrize("changes", [{"layers": (6,)}, {"feeds_normed": False}], ids=str)
def test_states_before_and_after_norms(target: MlxModel, plain: Answers, rate: float, changes: dict[str, Any]) -> None:
    """The head norms what it reads, and the weights of this target's last norm are nearly equal: little changes."""
    assert abs(measure(target, attach(target, FOLDER, **changes), plain) - rate) < 0.1


def test_heads_that_do_not_fit(target: MlxModel, tmp_path: Path) -> None:
    def check(error: type[EdgespecError], message: str, changes: dict[str, Any]) -> None:
        tensors = {**make_tensors("mtp", SIZE, LLAMA), **changes}
        folder = write_head(tmp_path / str(len(list(tmp_path.iterdir()))), tensors)
        refuse(target, folder, error, message)

    wide = np.zeros((512, 256), np.float32)
    layer = "mtp.layers.0."
    check(InvalidModelFile, "lacks the tensor mtp.norm.weight", {"mtp.norm.weight": None})
    check(InvalidModelFile, r"tensor fc has the shape \(512, 256\), not \(256, 512\)", {"mtp.fc.weight": wide})
    check(
        InvalidModelFile, "tensor q_norm has the shape", {f"{layer}self_attn.q_norm.weight": np.ones(128, np.float32)}
    )
    check(InvalidModelFile, "MLX cannot read .*F64", {"mtp.norm.weight": np.ones(256)})
    check(InvalidModelFile, "does not have one MTP layer", {"mtp.layers.1.mlp.up_proj.weight": wide})
    check(InvalidModelFile, "does not have one MTP layer", {"model.layers.6.eh_proj.weight": wide})
    check(InvalidModelFile, "experts that is not Qwen's", {f"{layer}mlp.shared_experts.up_proj.weight": wide})
    check(InvalidModelFile, "lacks the tensor mtp.layers.0.mlp.switch_mlp", {f"{layer}mlp.gate.weight": wide})
    check(InvalidModelFile, "has latent attention", {f"{layer}self_attn.kv_a_proj_with_mqa.weight": wide})
    check(Unsupported, "vocabulary of 512 tokens; the model has 4,096", {"mtp.embed_tokens.weight": wide})
    small = write_folder(tmp_path / "small", make_tensors("mtp", 128, LLAMA), make_config("mtp", 128, VOCABULARY))
    refuse(target, small, Unsupported, "hidden size of 128; the model has 256")
