"""Speeds of MLX models that are not here: what a forward reads, and what is measured of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.formats.mlx_folder import Folder, read_folder
from edgespec.models import mlx_speed
from edgespec.models.mlx_speed import guess_kind, load_mlx_speed, measure_mlx_speed, read_folder_by_kind
from tests.mlx_models import CONFIGS, make_folder


def folder(weight_bytes: int, **config: Any) -> Folder:
    return Folder(Path("m"), "m", {"model_type": "llama", "hidden_size": 64, "vocab_size": 100, **config}, weight_bytes)


def test_a_forward_reads_the_weights_but_for_the_embedding_table() -> None:
    four = {"quantization": {"bits": 4, "group_size": 64}}
    assert read_folder_by_kind(folder(10_000, **four)) == {"4-bit": 10_000 - 6400 * 4.5 / 8}
    assert read_folder_by_kind(folder(10_000, tie_word_embeddings=True, **four)) == {"4-bit": 10_000}
    assert read_folder_by_kind(folder(20_000)) == {"16-bit": 20_000 - 12_800}
    assert read_folder_by_kind(folder(20_000, quantization={"bits": 7})) == {}


def test_a_forward_of_a_mixture_reads_the_routed_experts(tmp_path: Path) -> None:
    """Of four experts two, in a folder that mlx-lm has written."""
    path = make_folder(tmp_path / "m", {**CONFIGS["moe"], "hidden_size": 128, "moe_intermediate_size": 128}, bits=8)
    found = read_folder(path)
    experts = 2 * 4 * 3 * 128 * 128 * 8.5 / 8
    (read,) = read_folder_by_kind(found).values()
    embedding = 128 * found.config["vocab_size"] * 8.5 / 8
    assert read == pytest.approx(found.weight_bytes - embedding - experts / 2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mlx-community/Qwen3-4B-4bit", "4-bit"),
        ("x/y-8bit", "8-bit"),
        ("x/y-bf16", "16-bit"),
        ("x/gpt-oss", "4-bit"),
        ("x/y-7bit", "4-bit"),
    ],
)
def test_names_say_the_kind(name: str, kind: str) -> None:
    assert guess_kind(name)[0] == kind


def test_this_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    for name, value in (("_WIDTH", 256), ("_FEED_FORWARD", 512), ("_BYTES", 2**18)):
        monkeypatch.setattr(mlx_speed, name, value)
    said: list[str] = []
    rates = measure_mlx_speed(["4-bit", "16-bit"], said.append).rates
    assert rates.keys() == {"4-bit", "16-bit"} and all(rate[1] > 0 for rate in rates.values()) and len(said) == 1
    assert measure_mlx_speed(["4-bit"], said.append).rates == rates == load_mlx_speed().rates and len(said) == 1
    estimate = load_mlx_speed().estimate({"4-bit": 1e9}, {"16-bit": 1e8})
    assert estimate is not None and estimate.rows[1] > estimate.draft_s > 0  # type: ignore[operator]
