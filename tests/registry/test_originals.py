"""Where the original weights of a model are: what the registry says, and what the model's own files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.formats.gguf_validate import read_file
from edgespec.formats.mlx_folder import Folder
from edgespec.hub.cache import parse_reference
from edgespec.registry.schema import find_original, load_registry, read_folder_original, read_gguf_original
from tests.models import GgufBuilder


@pytest.mark.parametrize(
    ("reference", "original"),
    [
        ("bartowski/Llama-3.3-70B-Instruct-GGUF:Q8_0", "meta-llama/Llama-3.3-70B-Instruct"),
        ("mlx-community/Qwen2.5-0.5B-Instruct-4bit", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("a/b:Q8_0", None),
        ("./model.gguf", None),
        ("package:python-6m/target.gguf", None),
    ],
)
def test_the_registry_knows_its_models(reference: str, original: str | None, tmp_path: Path) -> None:
    assert find_original(parse_reference(reference), load_registry(tmp_path / "none")) == original


@pytest.mark.parametrize(
    ("reference", "original"),
    [
        ("amd/PARD-Qwen3-0.6B", "amd/PARD-Qwen3-0.6B"),
        ("mlx-community/Qwen3.8-27B-MTP-4bit", "Qwen/Qwen3.8-27B"),
        ("hf:unsloth/gemma-4-31B-it-GGUF/MTP/mtp-gemma-4-31B-it-Q8_0.gguf", "google/gemma-4-31B-it-assistant"),
        ("mlx-community/Qwen2.5-0.5B-Instruct-4bit", None),  # an ordinary draft
    ],
)
def test_a_head_may_lie_in_its_targets_repository(reference: str, original: str | None, tmp_path: Path) -> None:
    registry = load_registry(tmp_path / "none")
    assert find_original(parse_reference(reference), registry, is_head=True) == original


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({}, None),
        ({"general.source.repo_url": "https://huggingface.co/a/b"}, ("a/b", "general.source.repo_url")),
        (
            {
                "general.base_model.0.repo_url": "https://huggingface.co/c/d",
                "general.repo_url": "https://huggingface.co/a/b",
            },
            ("a/b", "general.repo_url"),
        ),
        ({"general.base_model.0.repo_url": "https://hf.co/a/b/tree/main"}, ("a/b", "general.base_model.0.repo_url")),
        ({"general.source.huggingface.repository": "a/b"}, ("a/b", "general.source.huggingface.repository")),
        ({"general.source.url": "https://github.com/a/b"}, None),
        (
            {"general.finetune": "Instruct", "general.base_model.0.repo_url": "https://huggingface.co/m/Llama-3.1-70B"},
            None,  # the base of a fine-tune
        ),
        (
            {"general.finetune": "it", "general.base_model.0.repo_url": "https://huggingface.co/google/gemma-3-1b-it"},
            ("google/gemma-3-1b-it", "general.base_model.0.repo_url"),
        ),
    ],
)
def test_what_a_gguf_file_says(metadata: dict[str, str], found: tuple[str, str] | None, tmp_path: Path) -> None:
    builder = GgufBuilder(tmp_path / "m.gguf", "llama", layers=1, width=64)
    for key, text in metadata.items():
        builder.writer.add_string(key, text)
    builder.attention(heads=4, kv_heads=2, head_width=16)
    builder.embeddings(64)
    builder.save()
    assert read_gguf_original(read_file(tmp_path / "m.gguf")) == found


@pytest.mark.parametrize(
    ("readme", "config", "found"),
    [
        ("---\nlicense: mit\nbase_model: a/b\n---\n# x", {}, "a/b"),
        ('---\nbase_model:\n- "a/b"\n- c/d\n---\n', {"_name_or_path": "e/f"}, "a/b"),
        ("# x\nbase_model: a/b\n", {"_name_or_path": "e/f"}, "e/f"),
        ("---\ntags: [mlx]\n---\nbase_model: a/b\n", {"_name_or_path": "./here"}, None),
        (None, {}, None),
    ],
)
def test_what_a_folder_says(readme: str | None, config: dict[str, str], found: str | None, tmp_path: Path) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_text(readme, encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = read_folder_original(Folder(tmp_path, "m", dict(config), 0))
    assert (said and said[0]) == found
