"""The real command, as a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "edgespec"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with a cache and configuration of its own, and no network."""
    others = ("HF_", "EDGESPEC_", "XDG_", "OLLAMA_", "LLAMA_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    return {**kept, "HF_HOME": str(tmp_path / "hf"), "EDGESPEC_CONFIG_DIR": str(tmp_path / "config"),
            "EDGESPEC_CACHE_DIR": str(tmp_path / "cache"), "EDGESPEC_DATA_DIR": str(tmp_path / "data"),
            "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}  # fmt: skip


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Cli:
    """Run `edgespec ARGUMENTS`; no traceback may ever appear."""

    def run(*arguments: str, stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
        child = subprocess.run(
            [*COMMAND, *arguments],
            input=stdin.encode(),
            capture_output=True,
            env={**environment, **extra},
            cwd=tmp_path,
            timeout=120,
            check=False,
        )
        out, err = child.stdout.decode(), child.stderr.decode()
        assert "Traceback" not in out + err and "Internal error" not in err, err
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)

    return run
