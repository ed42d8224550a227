"""Functions in processes of their own, which leave other children of this process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from threading import Timer
from time import sleep

import pytest

from edgespec.cancel import cancellable
from edgespec.errors import Cancelled
from edgespec.isolated import ChildDied, Helper, answer_questions, run_in_child


def test_cancelling_ends_its_own_process_alone() -> None:
    other = get_context("spawn").Process(target=sleep, args=(60,))
    other.start()
    n_checks = 0

    def check() -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks > 2:
            raise Cancelled

    with pytest.raises(Cancelled), cancellable(check):
        run_in_child(sleep, 60)
    other.join(0.5)
    assert other.is_alive()
    other.kill()
    other.join()


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from edgespec.isolated import run_in_child\nprint('once')\nprint(run_in_child(divmod, 7, 2))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "once\n(3, 1)\n"


def test_errors_and_deaths_are_told() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_child(divmod, 1, 0)
    with pytest.raises(ChildDied):
        run_in_child(_die)


def _die() -> None:
    os.abort()


def test_modules_of_the_present_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    assert run_in_child(divmod, 7, 2) == (3, 1)


def test_large_arguments_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.isolated._POLL_S", 0.001)  # the process has read nothing at the first look
    assert run_in_child(len, b"x" * 300_000) == 300_000


def main() -> None:
    """What a Helper of these tests runs: its setup is added to each question, a number of seconds or of bytes."""
    answer_questions(lambda added: lambda question: _act(question) + added)


def _act(question: float | bytes) -> int:
    if isinstance(question, bytes):
        os.abort()
    held = b"x" * (int(question) // 1000)
    sleep(question % 1000)
    return len(held)


@pytest.fixture
def helper() -> Iterator[Helper]:
    with closing(Helper(__name__, 7, deadline_s=2.0, max_bytes=300 * 2**20)) as made:
        yield made


def test_a_helper_answers_until_it_is_killed_and_after_that(helper: Helper) -> None:
    helper.start()
    assert [helper.ask(0), helper.ask(3000)] == [7, 10]
    first = helper._process
    assert first is not None
    with pytest.raises(ChildDied, match="more than 2 seconds"):
        helper.ask(30)
    assert first.poll() is not None, "it was killed"
    assert helper.ask(0) == 7
    with pytest.raises(ChildDied, match="too much memory"):
        helper.ask(400 * 2**20 * 1000 + 30)
    with pytest.raises(ChildDied, match="ended unexpectedly"):
        helper.ask(b"")
    assert helper.ask(0) == 7


def test_a_helper_can_be_closed_while_it_is_asked(helper: Helper) -> None:
    helper.ask(0)
    Timer(0.2, helper.close).start()
    with pytest.raises(ChildDied):
        helper.ask(0.9)
