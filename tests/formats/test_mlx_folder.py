"""Model folders judged from their small files: cache sizes of the kinds of attention, vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import CacheError, InvalidModelFile
from edgespec.formats.mlx_folder import Folder, read_config
from edgespec.models.fit import estimate_memory
from edgespec.models.tokenizer_compat import find_tokenizer_mismatch

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def folder(**changes: Any) -> Folder:
    return Folder(Path("/nowhere"), "m", {**LLAMA_8B, **changes}, 4_500_000_000)


@pytest.mark.parametrize(
    ("changes", "elements_at_8192"),
    [
        ({}, 32 * 2 * 8 * 128 * 8192),
        ({"head_dim": 64}, 32 * 2 * 8 * 64 * 8192),
        ({"num_key_value_heads": None}, 32 * 2 * 32 * 128 * 8192),
        ({"full_attention_interval": 4}, 8 * 2 * 8 * 128 * 8192),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * (512 + 64) * 8192),
        (
            {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 1024},
            2 * 8 * 128 * (5 * (1024 + 256) + 8192),
        ),
        ({"layer_types": ["mamba", "attention", "conv", "something_new"]}, 2 * 2 * 8 * 128 * 8192),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 2 * 8 * 128 * 8192),
        ({"layer_types": ["sliding_attention"], "sliding_window": 32768}, 2 * 8 * 128 * 8192),
    ],
)
def test_the_cache_of_each_kind_of_attention(changes: dict[str, Any], elements_at_8192: int) -> None:
    assert folder(**changes).kv_elements(8192) == elements_at_8192
    assert estimate_memory(folder(**changes), 8192).kv == 2 * elements_at_8192
    assert estimate_memory(folder(**changes), 8192, "q8_0").kv == elements_at_8192 * 34 // 32


def test_settings_of_a_multimodal_model() -> None:
    outer = {"model_type": "gemma3", "text_config": {**LLAMA_8B, "model_type": "gemma3_text"}}
    found = Folder(Path("/nowhere"), "m", outer, 1)
    assert found.trained_context == 131072
    assert found.kv_elements(1) == folder().kv_elements(1)


@pytest.mark.parametrize("value", [None, "8192", -1, 0, True, 1.5])
def test_a_context_that_is_no_number_is_not_stated(value: Any) -> None:
    assert folder(max_position_embeddings=value).trained_context is None


def with_vocabulary(path: Path, content: Any) -> Folder:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA_8B))
    (path / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_config(path, path.name, 1)


def test_vocabularies_of_both_kinds(tmp_path: Path) -> None:
    added = {"added_tokens": [{"id": 2, "content": "<end>"}]}
    bpe = with_vocabulary(tmp_path / "bpe", {"model": {"vocab": {"a": 0, "b": 1}}, **added})
    unigram = with_vocabulary(tmp_path / "unigram", {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, **added})
    longer = with_vocabulary(tmp_path / "longer", {"model": {"vocab": {"a": 0, "b": 1, "c": 3}}, **added})
    other = with_vocabulary(tmp_path / "other", {"model": {"vocab": {"a": 0, "x": 1}}})
    assert bpe.vocabulary == {0: "a", 1: "b", 2: "<end>"}
    assert find_tokenizer_mismatch(bpe, unigram) is None
    assert find_tokenizer_mismatch(bpe, longer) == "only the draft has token 3, 'c': 4 tokens against 3"
    marks = [*added["added_tokens"], {"id": 3, "content": "image", "special": True}, {"id": 9, "content": "<think>"}]
    marked = with_vocabulary(tmp_path / "marked", {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": marks})
    assert marked.control_tokens == {3}
    assert find_tokenizer_mismatch(bpe, marked) is find_tokenizer_mismatch(marked, bpe) is None
    assert find_tokenizer_mismatch(bpe, other) == "token 1 is 'b' in the target and 'x' in the draft"
    (tmp_path / "other" / "tokenizer.json").unlink()
    assert find_tokenizer_mismatch(bpe, read_config(tmp_path / "other", "other", 1)) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"model": 3}',
        '{"model": {"vocab": 3}}',
        '{"model": {"vocab": {"a": [1]}}}',
        '{"model": {"vocab": [[3, 1.0]]}}',
    ],
)
def test_damaged_vocabularies(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidModelFile, match=r"tokenizer\.json"):
        _ = with_vocabulary(tmp_path / "m", content).vocabulary


def test_a_model_type_that_only_heads_may_leave_out(tmp_path: Path) -> None:
    """Published Medusa heads name none."""
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    assert read_config(tmp_path, "m", 1).config == {"medusa_num_heads": 2}
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(InvalidModelFile, match="names no model_type"):
        read_config(tmp_path, "m", 1)


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CacheError, match="cannot be read"):
        read_config(tmp_path, "m", 1)
