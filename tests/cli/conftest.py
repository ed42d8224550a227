"""The real command, as a child process: forked from one that has imported it, or started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zygote import run_command

Cli = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "edgespec"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with a cache and configuration of its own, and no network."""
    others = ("HF_", "EDGESPEC_", "XDG_", "OLLAMA_", "LLAMA_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    return {**kept, "HF_HOME": str(tmp_path / "hf"), "EDGESPEC_CONFIG_DIR": str(tmp_path / "config"),
            "EDGESPEC_CACHE_DIR": str(tmp_path / "cache"), "EDGESPEC_DATA_DIR": str(tmp_path / "data"),
            "EDGESPEC_MODEL": "python-6m",
            "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}  # fmt: skip


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Cli:
    """Run `edgespec ARGUMENTS`; no traceback may ever appear. `extra` variables are those of the command alone."""

    def run(*arguments: str, stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
        is_new = any(name.startswith(("PYTHON", "GLIBC_")) for name in extra)  # these are read when a program starts
        done = run_command(arguments, {**environment, **extra}, tmp_path, stdin.encode(), is_new=is_new)
        assert "Traceback" not in done.stdout + done.stderr and "Internal error" not in done.stderr, done.stderr
        return done

    return run
