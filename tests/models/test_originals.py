"""Where the original weights of a model are: what the registry says, and what the model's own files say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.formats.gguf_validate import read_file
from edgespec.formats.mlx_folder import Folder
from edgespec.models.originals import find_original, read_folder_original, read_gguf_original
from edgespec.models.references import parse_reference
from edgespec.models.registry import load_registry
from tests.gguf_models import TARGET

BASE, REPO = "general.base_model.0.repo_url", "general.repo_url"


@pytest.mark.parametrize(
    ("reference", "is_head", "original"),
    [
        ("bartowski/Llama-3.3-70B-Instruct-GGUF:Q8_0", False, "meta-llama/Llama-3.3-70B-Instruct"),
        ("mlx-community/Qwen2.5-0.5B-Instruct-4bit", False, "Qwen/Qwen2.5-0.5B-Instruct"),
        ("a/b:Q8_0", False, None),
        ("./model.gguf", False, None),
        ("package:python-6m/target.gguf", False, None),
        ("amd/PARD-Qwen3-0.6B", True, "amd/PARD-Qwen3-0.6B"),
        ("mlx-community/Qwen3.8-27B-MTP-4bit", True, "Qwen/Qwen3.8-27B"),
        ("hf:unsloth/gemma-4-31B-it-GGUF/MTP/mtp-gemma-4-31B-it-Q8_0.gguf", True, "google/gemma-4-31B-it-assistant"),
        ("mlx-community/Qwen2.5-0.5B-Instruct-4bit", True, None),  # an ordinary draft
    ],
)
def test_the_registry_knows_its_models(reference: str, is_head: bool, original: str | None, tmp_path: Path) -> None:
    """A head may lie in the repository of its target."""
    registry = load_registry(tmp_path / "none")
    assert find_original(parse_reference(reference), registry, is_head=is_head) == original


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({}, None),
        ({"general.source.repo_url": "https://huggingface.co/a/b"}, ("a/b", "general.source.repo_url")),
        ({BASE: "https://huggingface.co/c/d", REPO: "https://huggingface.co/a/b"}, ("a/b", REPO)),
        ({BASE: "https://hf.co/a/b/tree/main"}, ("a/b", BASE)),
        ({"general.source.huggingface.repository": "a/b"}, ("a/b", "general.source.huggingface.repository")),
        ({"general.source.url": "https://github.com/a/b"}, None),
        (
            {"general.finetune": "Instruct", BASE: "https://huggingface.co/m/Llama-3.1-70B"},
            None,
        ),  # what it is made from
        ({"general.finetune": "it", BASE: "https://hf.co/google/gemma-3-1b-it"}, ("google/gemma-3-1b-it", BASE)),
    ],
)
def test_what_a_gguf_file_says(metadata: dict[str, str], found: tuple[str, str] | None) -> None:
    assert read_gguf_original(replace(read_file(TARGET), metadata=metadata)) == found


@pytest.mark.parametrize(
    ("readme", "config", "found"),
    [
        ("---\nlicense: mit\nbase_model: a/b\n---\n# x", {}, "a/b"),
        ('---\nbase_model:\n- "a/b"\n- c/d\n---\n', {"_name_or_path": "e/f"}, "a/b"),
        ("---\nlicense: mit\n---\n", {"_name_or_path": "e/f"}, "e/f"),
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
