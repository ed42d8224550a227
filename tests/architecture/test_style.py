"""Lint and types, so that the one test command says everything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.models import REPOSITORY


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=["lint", "format", "types"],
)
def test_style(command: list[str]) -> None:
    child = subprocess.run(
        [sys.executable, "-m", *command], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
