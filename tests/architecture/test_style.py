"""Lint and types, so that the one test command says everything."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.gguf_models import REPOSITORY


def check(*command: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", *command], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_style(command: tuple[str, ...]) -> None:
    check("ruff", *command, ".")


def test_style_of_types(tmp_path: Path) -> None:
    """Of all packages, and of the programs that documents show: one run reads what they share once."""
    configured = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["files"]
    programs = []
    for document in ("README.md", "docs/python.md"):
        text = (REPOSITORY / document).read_text(encoding="utf-8")
        programs.append(tmp_path / f"program_of_{Path(document).stem}.py".lower())
        programs[-1].write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), encoding="utf-8")
        assert "edgespec.load(" in programs[-1].read_text(encoding="utf-8")
    check("mypy", *configured, *map(str, programs))
