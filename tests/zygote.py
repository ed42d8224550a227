"""Runs commands in forks of a process that has imported them, because imports are most of a short command's time.

`python -m tests.zygote FD` reads requests from a Unix socket: arguments, environment and folder as JSON, beside
them the files for stdin, stdout and stderr. It replies with the exit code. A fourth file is for a command that runs
beside the others: its process id and its exit code are written there. Only modules that read no environment variables
on import are imported in advance.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

REPOSITORY = Path(__file__).resolve().parents[1]
_COMMANDS = "main run serve server"  # modules of edgespec.cli
_SERVER = ("app", "connections")  # modules of edgespec.server
MAX_S = 300  # for one command; trainings have a low priority
_MAX_BYTES = 2**18  # of a request


class Zygote:
    """The process that is forked, from outside."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.zygote", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=REPOSITORY)
        theirs.close()

    def run(
        self, arguments: Sequence[str], stdin: bytes, environment: Mapping[str, str], folder: Path
    ) -> subprocess.CompletedProcess[str]:
        """`edgespec ARGUMENTS` in a process of its own; after MAX_S it is ended, with the exit code -SIGALRM."""
        with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            request = json.dumps([list(arguments), dict(environment), str(folder)]).encode()
            socket.send_fds(self._socket, [request], [given.fileno(), out.fileno(), err.fileno()])
            code = int(self._socket.recv(16))
            written = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
        return subprocess.CompletedProcess(arguments, code, *written)

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, output: int
    ) -> ForkedProcess:
        """`edgespec ARGUMENTS` in a process of its own, which writes to the file `output`."""
        reader, writer = os.pipe()
        request = json.dumps([list(arguments), dict(environment), str(folder)]).encode()
        with open(os.devnull) as nothing:
            socket.send_fds(self._socket, [request], [nothing.fileno(), output, output, writer])
        os.close(writer)
        return ForkedProcess(open(reader, "rb", buffering=0))


class ForkedProcess:
    """A command that runs, with the methods of subprocess.Popen."""

    def __init__(self, reports: BinaryIO) -> None:
        self.pid = int(reports.readline())
        self.returncode: int | None = None
        self._reports = reports

    def wait(self, timeout: float) -> int:
        """The exit code. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("edgespec", timeout)
            self.returncode = int(self._reports.readline())
            self._reports.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def open_zygote() -> Zygote:
    """One for this process; it ends when this process does."""
    return Zygote()


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """`edgespec ARGUMENTS` in a process of its own: forked, but where libraries of the system do not expect forks."""
    if sys.platform == "linux":
        return open_zygote().run(arguments, stdin, environment, folder)
    command = [sys.executable, "-m", "edgespec", *arguments]
    done = subprocess.run(
        command, input=stdin, capture_output=True, env=environment, cwd=folder, timeout=MAX_S, check=False
    )
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def serve(requests: socket.socket) -> None:
    """Follow each request; returns in the child as the command, and at the end."""
    while True:
        request, files, _, _ = socket.recv_fds(requests, _MAX_BYTES, 4)
        if not request:
            return
        child = os.fork()
        if not child:
            requests.close()
            if files[3:]:
                report(files)
            else:
                signal.alarm(MAX_S)
            start(json.loads(request), files[:3])
        for file in files:
            os.close(file)
        if not files[3:]:
            requests.send(str(wait(child)).encode())


def wait(child: int) -> int:
    """The exit code of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def report(files: Sequence[int]) -> None:
    """Fork; the child returns, and its parent reports of it."""
    child = os.fork()
    if not child:
        os.close(files[3])
        return
    for file in files[:3]:
        os.close(file)
    os.write(files[3], f"{child}\n".encode())
    os.write(files[3], f"{wait(child)}\n".encode())
    os._exit(0)


def start(request: tuple[list[str], dict[str, str], str], files: Sequence[int]) -> None:
    """Become `python -m edgespec ARGUMENTS`, and exit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
    arguments, environment, folder = request
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(target, "w", buffering=1, closefd=False) for target in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    importlib.import_module("edgespec.cli.main").main(arguments)


if __name__ == "__main__":
    for name in _COMMANDS.split():
        importlib.import_module(f"edgespec.cli.{name}")
    for name in _SERVER:
        importlib.import_module(f"edgespec.server.{name}")
    gc.freeze()  # pages that no collection visits stay shared
    serve(socket.socket(fileno=int(sys.argv[1])))
