"""Functions in processes of their own, which leave other children of this process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from time import sleep

import pytest

from edgespec.backends.isolated import ChildDied, run_in_child
from edgespec.errors import Cancelled


def test_cancelling_ends_its_own_process_alone() -> None:
    other = get_context("spawn").Process(target=sleep, args=(60,))
    other.start()
    n_checks = 0

    def check() -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks > 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        run_in_child(sleep, 60, check=check)
    other.join(0.5)
    assert other.is_alive()
    other.kill()
    other.join()


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from edgespec.backends.isolated import run_in_child\n"
        "print('once')\n"
        "print(run_in_child(divmod, 7, 2, check=lambda: None))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "once\n(3, 1)\n"


def test_errors_and_deaths_are_told() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_child(divmod, 1, 0, check=lambda: None)
    with pytest.raises(ChildDied):
        run_in_child(_die, check=lambda: None)


def _die() -> None:
    os.abort()


def test_modules_of_the_present_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    assert run_in_child(divmod, 7, 2, check=lambda: None) == (3, 1)


def test_large_arguments_arrive() -> None:
    assert run_in_child(len, b"x" * 300_000, check=lambda: None) == 300_000
