"""Types of the package and of the programs that documents show. `make lint` and CI run ruff."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.gguf_models import REPOSITORY


def test_types(tmp_path: Path) -> None:
    configured = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["files"]
    programs = []
    for document in ("README.md", "docs/python.md"):
        text = (REPOSITORY / document).read_text(encoding="utf-8")
        programs.append(tmp_path / f"program_of_{Path(document).stem}.py".lower())
        programs[-1].write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), encoding="utf-8")
        assert "edgespec.load(" in programs[-1].read_text(encoding="utf-8")
    command = [sys.executable, "-m", "mypy", *configured, *map(str, programs)]  # one run reads what they share once
    child = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
