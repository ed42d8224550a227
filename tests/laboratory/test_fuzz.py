"""The ends of cases, as the program that opens damaged files tells them apart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from laboratory import fuzz
from laboratory.fuzz import run_case
from laboratory.fuzz_cases import Place


def _exit(code: int) -> None:
    raise SystemExit(code)


@pytest.mark.parametrize(
    ("end", "command"),
    [
        ("answered", lambda: _exit(0)),
        ("told", lambda: _exit(5)),
        ("internal", lambda: _exit(70)),
        ("death", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
        ("hang", lambda: time.sleep(60)),
        ("memory", lambda: _exit(len(bytearray(b"x") * 2**30) and 0)),
    ],
)
def test_the_ends_of_a_case(
    end: str, command: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.cli.main.main", lambda arguments: command())
    monkeypatch.setattr(fuzz, "_LIMIT_S", 0.5 if end == "hang" else 30)
    if end == "memory":
        monkeypatch.setattr(fuzz, "_LIMIT_BYTES", 2**30)
    assert run_case(["run"], Place(tmp_path, tmp_path), "http://127.0.0.1:9")[0] == end
