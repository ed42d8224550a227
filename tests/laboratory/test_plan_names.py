"""`edgespec plan NAME` for names of models.toml: a hub with headers of published shapes, and shorter vocabularies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgespec.models.speed as speed
from edgespec.cli.plan import plan_command
from edgespec.errors import CacheError
from edgespec.models.report import format_plan
from edgespec.units import GIB
from laboratory.hub import OutlineHub
from laboratory.plan_names import count_traffic
from laboratory.published import PublishedFile, Vocabulary
from laboratory.published_files import FILES
from tests.cli.conftest import Cli

WORDS = Vocabulary("default", 600, 0, {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"}, eos=1, bos=2, add_bos=True)
VISION_WORDS = replace(WORDS, size=664, special={**WORDS.special, 600: "<image_soft_token>"}, padding=601)
BYTE_WORDS = Vocabulary("gpt-4o", 600, 100, {598: "<|startoftext|>", 599: "<|return|>"}, eos=599, bos=598)

Plan = Callable[..., tuple[dict[str, Any], dict[str, int]]]


def with_words(file: PublishedFile, vocabulary: Vocabulary, **smaller: Any) -> PublishedFile:
    return replace(file, shape=replace(file.shape, vocabulary=vocabulary, **smaller))


@pytest.fixture
def plan(cli: Cli, tmp_path: Path) -> Plan:
    """Plan a name: the command's JSON, and the bytes asked of the hub by file, which must be no more than headers."""

    def run(name: str, files: list[PublishedFile], *arguments: str) -> tuple[dict[str, Any], dict[str, int]]:
        root = tmp_path / "served"
        starts = [file.write(root) for file in files]
        with OutlineHub(root) as hub:
            command = ("plan", name, "--json", "--backend", "llamacpp", "--threads", "1", *arguments)
            done = cli(*command, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
            assert done.returncode == 0, done.stderr
            assert "Drafting by n-grams, without" not in done.stderr
            asked = {
                file.path: count_traffic(hub.requests, file, start)["asked"]
                for file, start in zip(files, starts, strict=True)
            }
        return json.loads(done.stdout), asked

    return run


def test_a_windowed_pair_with_vision_in_the_target_only(plan: Plan) -> None:
    """Gemma 3 27B has a token for images that its 1B lacks: the draft is used all the same."""
    target, draft = FILES["gemma-3-27b-q4"]
    files = [with_words(target, VISION_WORDS), with_words(draft, WORDS)]
    facts, asked = plan("gemma-3-27b-q4", files, "--no-speed", "--ctx", "8192")
    assert facts["draft"] == f"ngram+hf:{draft.repo}/{draft.path}" and facts["draft_bytes"] > 0
    assert facts["weights_bytes"] == pytest.approx(16.55e9 - 262208 * 5376 * 210 / 256, rel=0.005)
    assert facts["kv_bytes"] == 62 * 2 * 16 * 128 * 2 * 8192
    assert all(0 < each < 2 * 2**20 for each in asked.values())


def test_a_mixture_of_experts(plan: Plan) -> None:
    facts, _ = plan("gpt-oss-20b", [with_words(FILES["gpt-oss-20b"][0], BYTE_WORDS)], "--no-speed")
    assert facts["draft"] == "ngram" and "plain_tokens_per_second" not in facts
    assert facts["weights_bytes"] == pytest.approx(11.27 * GIB - 2 * 201088 * 2880 * 34 / 32, rel=0.005)


def test_a_small_mixture_is_measured(plan: Plan) -> None:
    small = with_words(FILES["gpt-oss-20b"][0], BYTE_WORDS, blocks=4, width=256, ffn=256, heads=4, kv_heads=2)
    facts, _ = plan("gpt-oss-20b", [small])
    assert facts["mixture"] and facts["plain_tokens_per_second"][0] > 0
    assert any("same experts" in line for line in format_plan(facts))


def test_what_run_would_do_where_the_pair_does_not_fit() -> None:
    facts = {
        "name": "m", "backend": "llamacpp", "draft": "d", "draft_models": ["d"], "context": 8192,
        "weights_bytes": GIB, "kv_bytes": GIB, "draft_bytes": GIB, "heads": [], "adapted_drafts": [],
        "needed_bytes": 3 * GIB, "free_bytes": 2 * GIB, "fits": False, "fits_without_draft": True,
    }  # fmt: skip
    assert any("fits without the draft model" in line for line in format_plan(facts))
    assert not any("without the draft" in line for line in format_plan({**facts, "fits_without_draft": False}))


def test_no_room_for_a_measurement_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise CacheError("/tmp has no room for a measurement of 2.0 GiB.", hint="Free some disk space.")

    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(speed, "run_in_child", full)
    done = CliRunner().invoke(plan_command, ["--backend", "llamacpp"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "speed: no estimate, since its type of weights could not be measured" in done.output
