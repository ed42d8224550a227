"""Which files are heads."""

from __future__ import annotations

from pathlib import Path

from edgespec.models.head_files import is_head
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
