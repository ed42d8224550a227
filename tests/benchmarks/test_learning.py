"""The program that measures what is learned over the conversations of a memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.conftest import Program
from tests.cli.test_adapt import keep_texts
from tests.models import llama

pytestmark = pytest.mark.slow


def test_learning(program: Program, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    llama(draft, layers=1, width=32)
    keep_texts(tmp_path)
    options = ("--memory", tmp_path / "memory", "--draft", draft, "--epochs", 1, "--learning-rate", 0.01)
    result = program("benchmarks.learning", *options, "--block", 30)
    first, second = result["blocks"]
    assert (first["first"], first["version"], first["low"], first["high"]) == (0, 0, 0, 0)
    assert "more are needed" in first["then"] and second["then"] in ("", "version 1")
    assert result["cpu_s"] > 0 and result["reading_cpu_s"] > 0
