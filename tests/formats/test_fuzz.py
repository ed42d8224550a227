"""Damaged files of every kind end in an answer or a sentence; `make nightly` opens many more of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from laboratory import fuzz
from laboratory.fuzz import KINDS, SERVED, Place, run_case
from tests.models import REPOSITORY

SLOW = [kind for kind in KINDS if kind.startswith("mlx") or kind == "head"]
QUICK = [kind for kind in (*KINDS, *SERVED) if kind not in SLOW]


@pytest.mark.parametrize(("kinds", "opens"), [(QUICK, 14), (SLOW, 4)], ids=["quick", "slow"])
def test_no_damaged_file_ends_the_process(kinds: list[str], opens: int, tmp_path: Path) -> None:
    chosen = [argument for kind in kinds for argument in ("--kind", kind)]
    command = [sys.executable, "-m", "laboratory.fuzz", "--opens", str(opens), "--keep", str(tmp_path), *chosen]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["opens"] == opens * len(kinds) and found["faults"] == 0 and len(found["kinds"]) == len(kinds)
    ends = {end for counts in found["kinds"].values() for end in counts}
    assert ends == {"answered", "told"}, "cases that all end alike would test nothing"


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
        ("memory", lambda: _exit(len(bytearray(b"x") * 2**26) and 0)),
    ],
)
def test_the_ends_of_a_case(
    end: str, command: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.cli.main.main", lambda arguments: command())
    monkeypatch.setattr(fuzz, "_LIMIT_S", 0.5)
    if end == "memory":
        monkeypatch.setattr(fuzz, "_LIMIT_BYTES", 2**26)
    assert run_case(["run"], Place(tmp_path, tmp_path), "http://127.0.0.1:9")[0] == end
