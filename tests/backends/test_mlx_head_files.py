"""Files of trained heads that do not fit their target on MLX: each is refused in a sentence."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.errors import EdgespecError, InvalidModelFile
from edgespec.formats.head_file import read_head
from tests.backends.assistant_heads import TARGET_WINDOWS, WIDTH, describe_layers, make_assistant, name_tensors
from tests.backends.medusa_heads import make_hydra, make_medusa, pickle_head, rewrite
from tests.backends.mlx_dflash_heads import make_folder as make_dflash
from tests.backends.mlx_pairs import attach, make_assistant_target, refuse, write_assistant
from tests.backends.pair_heads import LLAMA, make_config, make_tensors, write_folder
from tests.formats.head_files import call, make_pickle, write_torch
from tests.gguf_models import REPOSITORY, TARGET
from tests.mlx_models import load_target, make_folder

EAGLE3 = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
SIZE, VOCABULARY = 256, 4096
PREFIX = "prefix_embeding_layer."


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


WIDE = zeros(512, 256)
PAIRS: list[tuple[str, type[EdgespecError], str, dict[str, Any], dict[str, Any]]] = [
    (
        "eagle",
        InvalidModelFile,
        "lacks the tensor layers.0.mlp.up_proj.weight",
        {"layers.0.mlp.up_proj.weight": None},
        {},
    ),
    ("eagle", InvalidModelFile, r"0.o has the shape \(512, 256\)", {"layers.0.self_attn.o_proj.weight": WIDE}, {}),
    ("eagle", InvalidModelFile, "tensor fc.bias has the shape", {"fc.bias": zeros(7)}, {}),
    ("eagle", InvalidModelFile, r"embedding has the shape \(512, 256\)", {"embed_tokens.weight": WIDE}, {}),
    ("eagle", InvalidModelFile, "describes no layer: 0 heads", {}, {"num_attention_heads": 0}),
    ("eagle", InvalidModelFile, "describes no layer", {}, {"rope_scaling": {"type": "unheard"}}),
    ("eagle", InvalidModelFile, "not quantized as MLX does", {"fc.scales": np.zeros((256, 8), np.uint8)}, {}),
    (
        "eagle",
        InvalidModelFile,
        "not quantized as MLX does",
        {"fc.scales": zeros(256, 0), "fc.biases": zeros(256, 0)},
        {},
    ),
    ("mtp", InvalidModelFile, "lacks the tensor mtp.norm.weight", {"mtp.norm.weight": None}, {}),
    ("mtp", InvalidModelFile, "q_norm has the shape", {"mtp.layers.0.self_attn.q_norm.weight": zeros(128)}, {}),
    ("mtp", InvalidModelFile, "MLX cannot read .*F64", {"mtp.norm.weight": np.ones(256)}, {}),
    ("mtp", InvalidModelFile, "does not have one MTP layer", {"mtp.layers.1.mlp.up_proj.weight": WIDE}, {}),
    ("mtp", InvalidModelFile, "does not have one MTP layer", {"model.layers.6.eh_proj.weight": WIDE}, {}),
    ("mtp", InvalidModelFile, "not Qwen's", {"mtp.layers.0.mlp.shared_experts.up_proj.weight": WIDE}, {}),
    ("mtp", InvalidModelFile, "lacks the tensor mtp.layers.0.mlp.switch", {"mtp.layers.0.mlp.gate.weight": WIDE}, {}),
    ("mtp", InvalidModelFile, "latent attention", {"mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight": WIDE}, {}),
]


@pytest.mark.parametrize(("kind", "error", "message", "changes", "config"), PAIRS, ids=[each[2] for each in PAIRS])
def test_pairs(
    target: MlxModel,
    kind: str,
    error: type[EdgespecError],
    message: str,
    changes: dict[str, Any],
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    tensors = {**make_tensors(kind, SIZE, LLAMA), **changes}
    known = {name: each for name, each in tensors.items() if each is not None}
    refuse(target, write_folder(tmp_path / "head", known, make_config(kind, SIZE, VOCABULARY) | config), error, message)


EAGLE3_FILES: list[tuple[type[EdgespecError], str, dict[str, Any], dict[str, Any]]] = [
    (InvalidModelFile, "is no assistant", {}, {"kind": "gemma4-assistant"}),
    (Unsupported, "scores 2,048 tokens and does not name them", {"d2t": None}, {}),
    (InvalidModelFile, "lacks the tensor", {"fc.weight": None}, {}),
    (InvalidModelFile, "has the shape", {"midlayer.self_attn.o_proj.weight": mx.zeros((256, 128))}, {}),
    (InvalidModelFile, "does not name tokens", {"d2t": mx.full(2048, 5000, mx.int64)}, {}),
    (Unsupported, "not its own embeddings", {}, {"size": 128}),
]


@pytest.mark.parametrize(("error", "message", "changes", "spec"), EAGLE3_FILES, ids=[each[1] for each in EAGLE3_FILES])
def test_eagle3(
    target: MlxModel,
    error: type[EdgespecError],
    message: str,
    changes: dict[str, Any],
    spec: dict[str, Any],
    tmp_path: Path,
) -> None:
    description = read_head(EAGLE3)
    assert description is not None
    shutil.copytree(EAGLE3, tmp_path / "head")
    arrays = {**mx.load(str(EAGLE3 / "model.safetensors")), **changes}
    kept = {name: each for name, each in arrays.items() if each is not None}
    mx.save_safetensors(str(tmp_path / "head" / "model.safetensors"), kept)
    with pytest.raises(error, match=message):
        target.load_head(replace(description, **spec), tmp_path / "head")


BLOCKS: list[tuple[str, type[EdgespecError], str, dict[str, Any], dict[str, Any]]] = [
    ("dflash", Unsupported, "and its file names none", {}, {"mask_token": None}),
    ("dflash", Unsupported, "names 4,096 of 4,096", {}, {"mask_token": 4096}),
    ("dflash", Unsupported, "blocks of 1 positions", {"n_rows": 1}, {}),
    ("dflash", Unsupported, "blocks of 65 positions", {"n_rows": 65}, {}),
    ("dflash", Unsupported, "hidden_act = gelu", {"config": {"hidden_act": "gelu"}}, {}),
    ("dflash", Unsupported, "scores 300 tokens and", {"tensors": {"lm_head.weight": mx.zeros((300, 256))}}, {}),
    ("dflash", Unsupported, "scores 4,096 tokens and", {"tensors": {"d2t": mx.zeros(300, mx.int64)}}, {}),
    ("dflash", InvalidModelFile, "lacks the tensor hidden_norm", {"tensors": {"hidden_norm.weight": None}}, {}),
    ("dflash", InvalidModelFile, "which is not run", {"tensors": {"confidence_head.weight": mx.ones(2)}}, {}),
    ("dflash", Unsupported, "a DFlash2 head", {"tensors": {"candidate_selector.hidden.weight": mx.ones(2)}}, {}),
    ("dflash", InvalidModelFile, "2 layers, its config.json names 3", {"config": {"num_hidden_layers": 3}}, {}),
    (
        "dflash",
        InvalidModelFile,
        "a window and not a type for each layer",
        {"config": {"use_sliding_window": True, "sliding_window": 9}},
        {},
    ),
    ("dflash", InvalidModelFile, "describes no layer", {"config": {"num_attention_heads": "4"}}, {}),
    ("dspark", Unsupported, "markov_head_type = gated", {"config": {"markov_head_type": "gated"}}, {}),
    (
        "dspark",
        InvalidModelFile,
        "lacks its Markov head",
        {"tensors": {"markov_head.markov_w1.weight": None}},
        {},
    ),
    (
        "dspark",
        InvalidModelFile,
        r"markov_2 has the shape \(4000, 8\), not \(4096, 8\)",
        {"tensors": {"markov_head.markov_w2.weight": mx.zeros((4000, 8))}},
        {},
    ),
]


@pytest.mark.parametrize(("kind", "error", "message", "settings", "spec"), BLOCKS, ids=[each[2] for each in BLOCKS])
def test_blocks(
    target: MlxModel,
    kind: str,
    error: type[EdgespecError],
    message: str,
    settings: dict[str, Any],
    spec: dict[str, Any],
    tmp_path: Path,
) -> None:
    sizes = {"size": SIZE, "layers": (1, 3, 6), "vocab_size": VOCABULARY}
    refuse(target, make_dflash(tmp_path / "head", kind, **{**sizes, **settings}), error, message, **spec)


INDEPENDENT: list[tuple[str, str, dict[str, Any]]] = [
    ("medusa", "has the shape", {"1.0.linear.weight": zeros(SIZE, 128)}),
    ("medusa", "has the shape", {"1.0.linear.bias": zeros(8)}),
    ("medusa", "scores 4,000 tokens and does not name them", {"0.1.weight": zeros(4000, SIZE)}),
    ("medusa", "lacks residual blocks", {"1.0.linear.weight": None}),
    ("medusa", "lacks residual blocks", {"1.2.linear.weight": zeros(SIZE, SIZE)}),
    ("hydra", "lacks blocks", {"hydra_mlp.1.1.linear.weight": None, "hydra_mlp.1.3.linear.weight": None}),
    ("hydra", "has the shape", {"hydra_mlp.1.1.linear.weight": zeros(SIZE, SIZE)}),
    ("hydra", "lacks blocks", {"hydra_mlp.2.1.res_connection.weight": None}),
    ("hydra", "has the shape", {"hydra_mlp.0.3.linear.weight": zeros(SIZE, 8)}),
    ("hydra", "lacks the tensor prefix_embeding_layer.norm.weight", {f"{PREFIX}norm.weight": None}),
    ("hydra", "has the shape", {f"{PREFIX}layers.0.self_attn.k_proj.weight": zeros(100, SIZE)}),
    ("hydra", "has the shape", {f"{PREFIX}layers.0.mlp.up_proj.weight": zeros(SIZE)}),
    ("hydra", "scores 4,000 tokens and does not name them", {"hydra_lm_head.1.1.weight": zeros(4000, SIZE)}),
]


@pytest.mark.parametrize(("kind", "message", "change"), INDEPENDENT)
def test_independent_heads(target: MlxModel, kind: str, message: str, change: dict[str, Any], tmp_path: Path) -> None:
    folder = (make_medusa if kind == "medusa" else make_hydra)(tmp_path / kind, size=SIZE, vocab_size=VOCABULARY)
    refuse(target, rewrite(folder, tmp_path / "head", change), (InvalidModelFile, Unsupported), message)


@pytest.mark.parametrize("kind", ["eagle", "mtp", "dflash", "medusa", "hydra"])
def test_heads_of_another_size(target: MlxModel, kind: str, tmp_path: Path) -> None:
    match kind:
        case "medusa" | "hydra":
            make = make_medusa if kind == "medusa" else make_hydra
            folder = make(tmp_path / "head", size=128, vocab_size=VOCABULARY)
        case "dflash":
            folder = make_dflash(tmp_path / "head", kind, size=128, layers=(1, 3, 6), vocab_size=VOCABULARY)
        case _:
            config = make_config(kind, 128, VOCABULARY)
            folder = write_folder(tmp_path / "head", make_tensors(kind, 128, LLAMA), config)
    refuse(target, folder, Unsupported, "hidden size of 128; the model has 256")


def test_layers_that_the_target_does_not_have(target: MlxModel, tmp_path: Path) -> None:
    head = attach(target, EAGLE3, layers=(1, 3, 9))
    with pytest.raises(Unsupported, match="reads layer 9, and the model has layers 0 to 5"):
        head.open_session(target.open_session())


def test_assistants(tmp_path: Path) -> None:
    make_assistant_target(tmp_path)
    tensors = name_tensors(make_assistant(tmp_path / "head.gguf"))
    options = LoadOptions(context_size=256)
    target, head = load(tmp_path / "target", options), write_assistant(tmp_path / "head", tensors)
    refuse(load(TARGET, options), head, Unsupported, "for a hidden size of 64; the model has 256")
    less = {name: each for name, each in tensors.items() if name != "post_projection.weight"}
    less_folder = write_assistant(tmp_path / "less", less)
    refuse(target, less_folder, InvalidModelFile, "less is no assistant: .*post_projection")
    wide = write_assistant(tmp_path / "wide", tensors, hidden_size=48)
    refuse(target, wide, InvalidModelFile, "wide is no assistant: ")
    rows = tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:500]}
    few = write_assistant(tmp_path / "few", rows, vocab_size=500)
    refuse(target, few, Unsupported, "for a vocabulary of 500 tokens")
    swapped = make_folder(tmp_path / "other", describe_layers(TARGET_WINDOWS, WIDTH) | {"head_dim": 16})
    refuse(load(swapped, options), head, Unsupported, "that of another model")


def test_pickles_that_are_no_heads(target: MlxModel, tmp_path: Path) -> None:
    """Also where the file changes between the check of its shapes and the reading of its weights."""
    folder = make_medusa(tmp_path / "head", size=SIZE, vocab_size=VOCABULARY)
    pickled = pickle_head(folder, tmp_path / "pickled", "medusa_lm_head.pt")
    spec = read_head(pickled)
    assert spec is not None
    place, file = tmp_path / "executed", pickled / "medusa_lm_head.pt"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", whole[:-60], b"PK\x05\x06" + bytes(18)):
        file.write_bytes(content)
        with pytest.raises(InvalidModelFile, match="is not read: "):
            target.load_head(spec, pickled)
    write_torch(file, make_pickle({"0.0.linear.weight": call("os", "system", f"touch {place}")}), {})
    with pytest.raises(InvalidModelFile, match="nothing is run from a file"):
        target.load_head(spec, pickled)
    assert not place.exists()
