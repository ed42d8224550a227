"""Commands in the process of the tests: most of the time of a short one in its own would be that of imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from edgespec.cli import main


def heed_interrupts() -> None:
    """As a terminal leaves it to programs; what a shell starts in the background inherits that they are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """`edgespec ARGUMENTS` with standard files, an environment and a folder of its own."""
    return run_here(lambda: main.run(arguments), environment, folder, stdin)


def run_here(
    command: Callable[[], int], environment: Mapping[str, str], folder: Path, stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """A command in this process. Libraries write to the standard files too, so the files are replaced."""
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        with chdir(folder), _replace_environment(environment), _replace_files(given, out, err):
            try:
                code = command()
            except SystemExit as end:  # click's, such as that of a shell's completion
                code = int(end.code or 0)
        written = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    return subprocess.CompletedProcess((), code, *written)


@contextmanager
def _replace_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """The variables, and how signals are handled."""
    before, during, on_terminate = dict(os.environ), dict(environment), signal.getsignal(signal.SIGTERM)
    os.environ.clear()
    os.environ.update(during)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGTERM, on_terminate)


@contextmanager
def _replace_files(*files: BinaryIO) -> Iterator[None]:
    before = sys.stdin, sys.stdout, sys.stderr
    saved = [os.dup(number) for number in range(3)]
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = before
        for number, file in enumerate(saved):
            os.dup2(file, number)
            os.close(file)
