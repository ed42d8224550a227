"""Which files are heads, and which repository holds the head that a file lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.formats.gguf_validate import read_file
from edgespec.registry.resolve import find_with_head, is_head
from edgespec.registry.schema import Registry, load_registry
from tests.formats.ggufs import write_gguf
from tests.formats.head_files import (
    H,
    eagle3_shapes,
    write_assistant,
    write_dflash,
    write_eagle3,
    write_folder,
    write_mtp,
)


def test_heads_are_told_from_models(tmp_path: Path) -> None:
    for write in (write_assistant, write_dflash, write_eagle3):
        assert is_head(write(tmp_path / f"{write.__name__}.gguf"))
    assert is_head(write_mtp(tmp_path / "mtp.gguf", trunk=False))
    assert not is_head(write_mtp(tmp_path / "whole.gguf", trunk=True)), "a model with its head"
    assert not is_head(write_gguf(tmp_path / "model.gguf"))
    config = {"model_type": "llama", "hidden_size": H, "draft_vocab_size": 32}
    assert is_head(write_folder(tmp_path / "head", config, eagle3_shapes()))
    assert not is_head(write_folder(tmp_path / "model", {"model_type": "llama"}, {"model.layers.0.a.weight": (H, H)}))


def test_a_damaged_head_is_a_head_and_anything_else_is_not(tmp_path: Path) -> None:
    head = write_eagle3(tmp_path / "head.gguf")
    head.write_bytes(head.read_bytes()[:-40])
    assert is_head(head)
    for name, content in (("empty", b""), ("text", b"GGUF" * 9), ("cut", b"GGUF general.architecture\x08\0\0\0\xff")):
        (tmp_path / name).write_bytes(content)
        assert not is_head(tmp_path / name)
    assert not is_head(tmp_path / "absent")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return load_registry(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("bartowski/Qwen3.5-9B-GGUF:Q4_K_M", "unsloth/Qwen3.5-9B-MTP-GGUF"),
        ("hf:someone/Qwen3.5-9B-GGUF/Qwen3.5-9B-Q4_K_M.gguf", "unsloth/Qwen3.5-9B-MTP-GGUF"),
        ("/models/Qwen3.6-35B-A3B-UD-Q4_K_M.gguf", "unsloth/Qwen3.6-35B-A3B-MTP-GGUF"),
        ("/models/GLM-4.5-Air-IQ4_XS-00001-of-00002.gguf", "jacek2024/GLM-4.5-Air-MTP-GGUF"),
        ("/models/Qwen3.8-27B.gguf", "unsloth/Qwen3.8-27B-GGUF"),
        ("/models/Qwen3.5-4B-Q4_K_M.gguf", None),
        ("/models/Llama-3.1-8B-Q4_K_M.gguf", None),
        ("glm.gguf", None),
    ],
)
def test_the_repository_with_the_head(tmp_path: Path, registry: Registry, name: str, found: str | None) -> None:
    model = read_file(write_gguf(tmp_path / "model.gguf"))
    reference = find_with_head(model, name, registry)
    assert (None if reference is None else str(reference)) == found


def test_a_renamed_file_is_known_by_its_metadata(tmp_path: Path, registry: Registry) -> None:
    model = read_file(write_gguf(tmp_path / "model.gguf"))
    model.metadata["general.name"] = "Qwen3.6 27B"
    assert str(find_with_head(model, "mine.gguf", registry)) == "unsloth/Qwen3.6-27B-MTP-GGUF"
