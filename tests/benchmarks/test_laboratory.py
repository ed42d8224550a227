"""The programs of the laboratory run on small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.formats.head_file import read_head
from tests.benchmarks.conftest import Program
from tests.gguf_models import DRAFT, REPOSITORY, TARGET

HEADS = REPOSITORY / "tests" / "fixtures" / "heads"


def test_cost_faithful(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = program("laboratory.cost_faithful", "30m", out, "--source", DRAFT, "--check")
    assert result["bytes"] == out.stat().st_size > 1e6
    assert result["quantized"]["faults"] == 0 and result["exact"]["equal"] > result["exact"]["tokens"] / 2


def check_head(result: dict[str, Any], out: Path, kind: str, layers: tuple[int, ...]) -> None:
    assert result["bytes"] == out.stat().st_size
    head = read_head(out)
    assert head is not None and (head.kind, head.layers) == (kind, layers)


def test_eagle3_gguf(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "head.gguf"
    check_head(program("laboratory.eagle3_gguf", HEADS / "eagle3-python-6m", TARGET, out), out, "eagle3", (1, 3, 5))


def test_dflash_gguf(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "head.gguf"
    check_head(program("laboratory.dflash_gguf", HEADS / "dflash-python-6m", TARGET, out), out, "dflash", (1, 3, 5))


def test_mtp_gguf(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    check_head(program("laboratory.mtp_gguf", HEADS / "mtp-python-6m", TARGET, out), out, "mtp", ())


def test_engine_keys(program: Program, tmp_path: Path) -> None:
    """On sources of the form that the engines' have."""
    sources = {
        "vllm/config/speculative.py": 'A = Literal["eagle"]\nSpeculativeMethod = Literal["ngram", A]\n'
        "class SpeculativeConfig:\n    model: str | None = None\n    def f(self): ...\n",
        "vllm-1.2.dist-info/METADATA": "Name: vllm\nVersion: 1.2\n",
        "sglang/srt/arg_groups/fields/spec.py": 'class Spec:\n    a_b: A[int, "help"] = 1\n'
        "    c: A[int, Arg(no_cli=True)] = 1\n",
        "sglang/srt/speculative/spec_info.py": "class SpeculativeAlgorithm(Enum):\n    EAGLE = auto()\n",
        "sglang/srt/speculative/spec_registry.py": '_RESERVED_ALIASES = frozenset({"NEXTN"})\n',
        "sglang-3.4.dist-info/METADATA": "Version: 3.4\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    out = tmp_path / "keys.json"
    assert program("laboratory.engine_keys", "vllm", tmp_path, out)["version"] == "1.2"
    kept = {"engine": "vllm", "version": "1.2", "options": {"model": "str | None"}, "methods": ["eagle", "ngram"]}
    assert json.loads(out.read_text()) == kept
    found = program("laboratory.engine_keys", "sglang", tmp_path, out)
    assert found["options"] == {"--a-b": "int"} and found["methods"] == ["EAGLE", "NEXTN"]
