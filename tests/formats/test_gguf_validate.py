"""Header values that llama.cpp aborts on are refused with what is wrong, before it sees them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf import Header, Value
from edgespec.formats.gguf_validate import check_model, read_file
from tests.formats.ggufs import TOKENS, write_gguf


@pytest.fixture
def header(tmp_path: Path) -> Header:
    return read_file(write_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 513, "block_count is 513"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "epsilon is nan"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "epsilon is -1"),
        ("llama.rope.scaling.type", "bogus", "rotary positions"),
        ("llama.rope.dimension_count", 3, "3 numbers of a head are rotated in pairs"),
        ("llama.rope.dimension_count", 0, "no number of a head is rotated"),
        ("llama.expert_count", 4, "experts"),
        ("llama.expert_used_count", 2, "experts"),
        ("llama.nextn_predict_layers", 9, "9 of 2 layers"),
        ("llama.attention.causal", False, "looks ahead"),
        ("llama.attention.head_count_kv", np.array([1, 0], np.uint32), "2 heads share 0"),
        ("tokenizer.ggml.model", "none", "vocabulary"),
        ("tokenizer.ggml.model", "llama", "no token for byte 0"),
        ("tokenizer.ggml.tokens", ["a", "a", *TOKENS[2:]], "1 tokens stand in its vocabulary twice"),
        ("tokenizer.ggml.tokens", ["a", "a\0b", *TOKENS[2:]], "twice"),
        ("tokenizer.ggml.tokens", ["", "[EMPTY_0]", *TOKENS[2:]], "twice"),
    ],
)
def test_refused(header: Header, key: str, value: object, message: str) -> None:
    check_model(header)
    changed = replace(header, metadata={**header.metadata, key: value})
    with pytest.raises(InvalidModelFile, match=message):
        check_model(changed)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"general.type": "adapter", "adapter.type": "lora"}, "is a LoRA adapter"),
        ({"general.type": "mmproj", "general.architecture": "clip"}, "is a projector"),
        ({"general.architecture": "clip"}, "is a projector"),
        ({"general.type": "imatrix", "imatrix.datasets": ["a.txt"]}, "is an importance matrix"),
        ({"general.architecture": "controlvector"}, "is a control vector"),
    ],
)
def test_files_that_stand_beside_a_model_are_named(header: Header, metadata: dict[str, Value], told: str) -> None:
    with pytest.raises(InvalidModelFile, match=told) as caught:
        check_model(replace(header, metadata=metadata))
    assert "model" in (caught.value.hint or "") and "pull" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.layer_norm_rms_epsilon", 1e-5),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.nextn_predict_layers", 1),
        ("general.architecture", "jamba"),
    ],
)
def test_what_real_models_say_is_let_through(header: Header, key: str, value: object) -> None:
    metadata = {
        k.replace("llama.", f"{value}.") if key == "general.architecture" else k: v for k, v in header.metadata.items()
    }
    metadata[key] = value
    if value == "jamba":  # layers without attention state no kv heads
        metadata["jamba.attention.head_count_kv"] = np.array([1, 0], np.uint32)
    check_model(replace(header, metadata=metadata))


def test_more_is_rotated_than_a_head_has(header: Header) -> None:
    sizes = {"llama.attention.key_length": 64, "llama.rope.dimension_count": 64}
    check_model(replace(header, metadata={**header.metadata, **sizes}))
    sizes["llama.rope.dimension_count"] = 66
    with pytest.raises(InvalidModelFile, match="66 numbers of a head are rotated, and it has 64"):
        check_model(replace(header, metadata={**header.metadata, **sizes}))


def test_latent_attention_may_go_without_rotation(header: Header) -> None:
    sizes = {"llama.attention.key_length_mla": 64, "llama.rope.dimension_count": 0}
    check_model(replace(header, metadata={**header.metadata, **sizes}))
