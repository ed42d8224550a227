"""Workers of tests: `edgespec worker` as a child process, on a port of its own."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import psutil

from edgespec.errors import BackendError
from edgespec.machines.workers import PROTOCOL, ask_worker
from tests.command import heed_interrupts
from tests.gguf_models import GgufBuilder

_START_S = 60.0


class WorkerProcess:
    """A worker that answers."""

    def __init__(
        self,
        port: int,
        *options: str,
        setup: Callable[[], None] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """`setup` is called in the child first; `extra` are variables of its environment."""
        self.port = port
        self.address = f"127.0.0.1:{port}"

        def prepare() -> None:
            heed_interrupts()
            if setup is not None:
                setup()

        command = [sys.executable, "-m", "edgespec", "worker", "--port", str(port), "--threads", "1", *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=prepare,
            env={**os.environ, **(extra or {})},
        )  # fmt: skip
        until_s = monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None and monotonic() < until_s, self.end()
            sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command, or one that it cannot pass on to its child, which computes."""
        if number in (signal.SIGINT, signal.SIGTERM):
            self._process.send_signal(number)
            return
        for child in psutil.Process(self._process.pid).children():
            child.send_signal(number)

    def read_until(self, line: str) -> str:
        """The output up to `line`, waiting for it; `end` returns the rest."""
        assert self._process.stdout is not None
        read = ""
        while not read.endswith(f"{line}\n"):
            more = self._process.stdout.readline()
            assert more, read
            read += more
        return read

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """(exit code, output) after a signal."""
        if self._process.poll() is None:
            self.send(number)
        output, _ = self._process.communicate(timeout=20)
        return self._process.returncode, output

    def _answers(self) -> bool:
        try:
            ask_worker(self.address)
        except BackendError:
            return False
        return True


@contextmanager
def started_worker(*options: str, **extra: str) -> Iterator[WorkerProcess]:
    """A worker on a free port, ended with the block."""
    worker = WorkerProcess(free_port(), *options, extra=extra)
    try:
        yield worker
    finally:
        worker.end(signal.SIGKILL)


@contextmanager
def lending(*devices: tuple[int, int]) -> Iterator[str]:
    """The address of a server that answers the first commands of a worker with these (free, total) bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_lend, args=(server, devices), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _lend(server: socket.socket, devices: Sequence[tuple[int, int]]) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # it has been closed
            return
        with connection, connection.makefile("rb") as requests:
            while head := requests.read(9):
                command, size = struct.unpack("<BQ", head)
                body = requests.read(size)
                if command == 14:
                    answer = bytes([*PROTOCOL, 0]) + bytes(25)
                elif command == 15:
                    answer = struct.pack("<I", len(devices))
                else:
                    answer = struct.pack("<QQ", *devices[struct.unpack("<I", body)[0]])
                connection.sendall(struct.pack("<Q", len(answer)) + answer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def limit_memory(size: int) -> Callable[[], None]:
    """For `setup`: address space of `size` bytes at most."""
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size))


def make_large(path: Path, layers: int) -> None:
    """A model whose feed-forward matrices are large enough for a worker's cache, which takes those above 10 MiB."""
    width, inner = 1024, 3072
    m = GgufBuilder(path, "llama", layers=layers, width=width)
    m.attention(heads=8, kv_heads=2, head_width=128)
    m.writer.add_feed_forward_length(inner)
    for i in range(layers):
        m.ones(f"blk.{i}.attn_norm", width)
        for name, rows in (("q", 1024), ("k", 256), ("v", 256), ("output", 1024)):
            m.matrix(f"blk.{i}.attn_{name}", rows, width)
        m.ones(f"blk.{i}.ffn_norm", width)
        m.matrix(f"blk.{i}.ffn_gate", inner, width)
        m.matrix(f"blk.{i}.ffn_up", inner, width)
        m.matrix(f"blk.{i}.ffn_down", width, inner)
    m.embeddings(width)
    m.save()
