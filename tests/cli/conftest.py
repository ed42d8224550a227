"""The command, in the process of the tests: with standard files, an environment and a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.train import options
from tests.command import run_command

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
def cli(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `edgespec ARGUMENTS`; no traceback may ever appear. `extra` variables are those of the command alone.

    `is_new`: in a process of its own, for variables that are read when Python starts.
    """
    monkeypatch.setattr(options, "lower_priority", lambda: None)  # of a training; it would be that of all later tests

    def run(*arguments: str, stdin: str = "", is_new: bool = False, **extra: str) -> subprocess.CompletedProcess[str]:
        variables = {**environment, **extra}
        if is_new:
            done = subprocess.run(
                [*COMMAND, *arguments], input=stdin, capture_output=True, env=variables, cwd=tmp_path, text=True,
                timeout=120, check=False,
            )  # fmt: skip
        else:
            done = run_command(arguments, variables, tmp_path, stdin.encode())
        assert "Traceback" not in done.stdout + done.stderr and "Internal error" not in done.stderr, done.stderr
        return done

    return run
