"""DFlash and DSpark heads in folders, converted for llama.cpp: what the file says, and its blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.backends.llamacpp.heads import open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.formats.head_file import read_head
from laboratory.dflash_gguf import convert
from tests.backends.dflash_heads import (
    BLOCK,
    DEPTH,
    FFN,
    HEAD_WIDTH,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MASK,
    Dialect,
    make_dflash,
)
from tests.backends.numpy_layers import ROPE_BASE
from tests.contract.toys import prefill
from tests.gguf_models import TARGET

TEXT: list[int] = np.random.default_rng(8).integers(1, 4000, 60).tolist()
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
    **{f"blk.{i}.{own}": f"layers.{i}.{name}" for i in range(DEPTH) for own, name in LAYER_NAMES.items()},
}
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_WIDTH,
    "intermediate_size": FFN,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": 4096,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [layer - 1 for layer in LAYERS]},
}


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = load(TARGET, LoadOptions(context_size=256, threads=1))
    yield model
    model.close()


def write_folder(path: Path, file: Path, **config: Any) -> Path:
    """The tensors of a GGUF file as a folder in z-lab's names; ids of the draft's tokens as offsets."""
    tensors = {}
    for each in gguf.GGUFReader(file).tensors:
        name, _, end = each.name.rpartition(".")
        if each.name == "d2t":
            tensors[each.name] = each.data - np.arange(len(each.data))
        else:
            tensors[f"{NAMES[name]}.{end}"] = np.array(each.data)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def draft(target: LlamaModel, path: Path) -> np.ndarray:
    """[rows, V] the block after TEXT."""
    spec = read_head(path)
    assert spec is not None
    head, session = open_head(target, path, spec), target.open_session()
    drafting = head.open_session(session)
    prefill(session, TEXT[:-1])
    rows = drafting.block(TEXT, len(TEXT), BLOCK)
    assert rows is not None
    drafting.close()
    session.close()
    head.close()
    return np.stack(rows)


CASES: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "dflash": (Dialect(), {"rope_theta": ROPE_BASE}),
    "nested rope": (Dialect(), {"rope_parameters": {"rope_theta": ROPE_BASE}}),
    "reduced": (Dialect(is_reduced=True), {"draft_vocab_size": 500}),
    "window": (
        Dialect(window=20),
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "causal": (Dialect(is_causal=True), {"is_causal": True}),
    "dspark": (Dialect(markov=True), {"architectures": ["Qwen3DSparkModel"]}),
    "dspark after the root": (
        Dialect(markov=False),
        {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": False},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_converted_head_drafts_the_same(target: LlamaModel, tmp_path: Path, case: str) -> None:
    dialect, config = CASES[case]
    original = make_dflash(tmp_path / "original.gguf", dialect)
    folder = write_folder(tmp_path / "folder", original, **config)
    convert(folder, TARGET, tmp_path / "converted.gguf")
    spec, stated = read_head(tmp_path / "converted.gguf"), read_head(folder)
    assert spec == dialect.spec and stated == spec
    found, wanted = draft(target, tmp_path / "converted.gguf"), draft(target, original)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    assert np.abs(found[finite] - wanted[finite]).max() < 0.1


def test_folders_that_llama_cpp_cannot_run(tmp_path: Path) -> None:
    original = make_dflash(tmp_path / "original.gguf")
    unstated = write_folder(tmp_path / "unstated", original, dflash_config={"target_layer_ids": [0, 2, 3, 4]})
    with pytest.raises(ValueError, match="with layers of the target and a mask token"):
        convert(unstated, TARGET, tmp_path / "head.gguf")
    folder = write_folder(tmp_path / "further", original, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"llama\.cpp has no place for layers\.1\."):
        convert(folder, TARGET, tmp_path / "head.gguf")
