"""Run a program with arguments, and read the JSON line at the end of its stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.command import run_here
from tests.gguf_models import REPOSITORY

MAX_S = 120  # for one program, on a busy machine
ALONE = {
    "benchmarks.environment",
    "benchmarks.startup",
}  # they change or measure their process

Process = subprocess.CompletedProcess[str]
Run = Callable[..., Process]
Program = Callable[..., dict[str, Any]]


@pytest.fixture
def run_module(tmp_path: Path) -> Run:
    """Run `python -m MODULE ARGUMENTS` with configuration, cache and data of its own, in this process where it may."""

    def run(module: str, *arguments: object) -> Process:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("EDGESPEC_", "HF_"))}
        environment |= {f"EDGESPEC_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "CACHE", "DATA")}
        environment |= {"HF_HOME": str(tmp_path / "hf"), "EDGESPEC_MODEL": "python-6m"}
        words = [*map(str, arguments)]
        if module not in ALONE:
            return run_here(lambda: import_module(module).main(words), environment, REPOSITORY)
        command = [sys.executable, "-m", module, *words]
        return subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=MAX_S, check=False
        )

    return run


@pytest.fixture
def program(run_module: Run) -> Program:
    """Run a program that has to succeed; returns the JSON line, the only line on stdout."""

    def run(module: str, *arguments: object) -> dict[str, Any]:
        done = run_module(module, *arguments)
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        result: dict[str, Any] = json.loads(line)
        assert result["benchmark"] == module.rsplit(".", 1)[1]
        return result

    return run
