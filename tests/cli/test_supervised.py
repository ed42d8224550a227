"""Commands that open models are children of a process that tells their end; here it is a real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from edgespec.cli.interrupts import INTERRUPTED, Presses, finish
from edgespec.client.stream import Stream
from edgespec.errors import BackendError, Cancelled
from tests.cli.conftest import COMMAND
from tests.gguf_models import REPOSITORY

ENDLESS = (
    "run",
    "def f(x):",
    "--max-tokens",
    "100000",
    "--threads",
    "1",
    "--draft",
    "none",
    "--ctx",
    "8192",
    "--temperature",
    "2",
)  # it would repeat itself


@contextmanager
def answering(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A command whose answer has begun, and its child."""
    with subprocess.Popen(
        [*COMMAND, *ENDLESS], text=True, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as run:  # fmt: skip
        try:
            assert run.stdout is not None and run.stdout.read(1), run.communicate()
            (child,) = psutil.Process(run.pid).children()
            yield run, child
        finally:
            run.kill()


def test_a_crash_is_a_sentence(environment: dict[str, str]) -> None:
    with answering(environment) as (run, child):
        child.send_signal(signal.SIGSEGV)
        said = run.communicate(timeout=60)[1]
        assert run.returncode == BackendError.exit_code
    assert "error: The engine's process ended with SIGSEGV" in said, said
    assert "\nhint: Try another model file." in said and "Traceback" not in said and "Fatal" not in said


def test_no_memory_is_a_sentence(environment: dict[str, str]) -> None:
    with answering(environment) as (run, child):
        child.kill()
        assert "The system kills processes when memory runs out." in run.communicate(timeout=60)[1]


@pytest.mark.parametrize("to_group", [True, False], ids=["a terminal's", "another program's"])
def test_ctrl_c_keeps_the_answer(environment: dict[str, str], *, to_group: bool) -> None:
    with answering(environment) as (run, _):
        (os.killpg if to_group else os.kill)(run.pid, signal.SIGINT)
        said = run.communicate(timeout=60)[1]
        assert run.returncode == INTERRUPTED and "; stopped" in said, said


def test_a_copy_of_ctrl_c_that_comes_late_is_no_second_one(environment: dict[str, str]) -> None:
    with answering(environment) as (run, _):
        os.kill(run.pid, signal.SIGSTOP)
        os.killpg(run.pid, signal.SIGINT)
        sleep(0.3)
        os.kill(run.pid, signal.SIGCONT)
        said = run.communicate(timeout=60)[1]
        assert run.returncode == INTERRUPTED and "; stopped" in said, said


ORDERS = sorted({"".join(each) for each in permutations("ggcc")})


@pytest.mark.parametrize("at", [*ORDERS, "gg", "cc", "ccg"])
def test_presses_are_counted_whenever_their_copies_come(at: str) -> None:
    """'g' reaches this process, 'c' is passed on by its parent: of two presses each, or of one of them alone."""
    presses, found = Presses(), 0

    def count(_number: int, _frame: object) -> None:
        nonlocal found
        found += presses.is_new()

    before = signal.signal(signal.SIGINT, count)
    try:
        for each in at:
            if each == "g":
                signal.raise_signal(signal.SIGINT)
            else:
                presses.pass_on()
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == 2


def test_native_code_that_ends_the_process_is_told(tmp_path: Path) -> None:
    script = (
        "import os, sys; from edgespec.cli import main, supervised\n"
        "if len(sys.argv) > 2:\n"
        "    main.main = lambda: (os.write(2, b'symbol \\x1b[2J lookup error\\n'), os._exit(127))\n"
        "    supervised.run_supervised(*map(int, sys.argv[1:3]), False)\n"
        "output = supervised._open_output()\n"
        "read, write = os.pipe()\n"
        "[os.set_inheritable(each, True) for each in (output, read)]\n"
        "child = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, sys.argv[0], str(output), str(read)])\n"
        "sys.exit(supervised._tell(child, output))\n"
    )
    (tmp_path / "program.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "EDGESPEC_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == BackendError.exit_code
    assert "ended with code 127: symbol" in done.stderr and "lookup error" in done.stderr and "\x1b" not in done.stderr


def test_programs_that_ignore_their_children_get_the_exit_code(environment: dict[str, str]) -> None:
    start = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", start, *COMMAND, "run", "x", "--model", "none.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr


def test_the_end_of_one_is_the_end_of_the_other(environment: dict[str, str]) -> None:
    with answering(environment) as (run, child):
        run.terminate()
        assert run.wait(60) == -signal.SIGTERM and not child.is_running()
    with answering(environment) as (run, child):
        run.kill()
        end = monotonic() + 60
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert monotonic() < end, "the command goes on for nobody"
            sleep(0.05)


def test_an_interrupt_that_comes_too_late_to_stop_the_work_is_not_lost() -> None:
    stream = Stream[int]()

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stream.end()

    threading.Timer(0.2, press).start()
    with pytest.raises(Cancelled):
        finish(stream)
    other = Stream[int]()
    other.end()
    finish(other)
