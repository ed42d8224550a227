"""Python processes beside the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gguf_models import REPOSITORY

_START = "import sys; from pathlib import Path; from edgespec.chat import Store; path = Path(sys.argv[1])\n"


def start(code: str, path: Path) -> subprocess.Popen[str]:
    """A process that runs `code`, for which `path` is a Path and Store is imported."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _START + code, str(path)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=REPOSITORY)


def outcome(child: subprocess.Popen[str]) -> str:
    """What the process prints until its end, which has to be a good one."""
    out, error = child.communicate("\n", timeout=60)
    assert child.returncode == 0, error
    return out
