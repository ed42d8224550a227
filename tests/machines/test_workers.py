"""What workers answer before llama.cpp connects to them, and the sentence for each that cannot serve."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

import edgespec.machines.workers as workers
from edgespec.backends.llamacpp.split import divide, split_layers
from edgespec.backends.options import LoadOptions
from edgespec.errors import BackendError, InvalidRequest
from edgespec.machines.memory import DeviceMemory, Memory
from edgespec.machines.workers import PROTOCOL, Worker, ask_worker, find_workers, split_addresses
from tests.workers import free_port, started_worker

GIB = 2**30


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with started_worker() as worker:
        yield worker.address


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that gives its first connection to `serve`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    serve(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


def hello(connection: socket.socket, version: tuple[int, int, int]) -> None:
    connection.recv(1 + 8 + 24)
    connection.sendall(struct.pack("<Q3Bx24x", 28, *version))
    connection.recv(64)


def test_a_worker_of_this_build_speaks_the_version_that_is_expected(address: str) -> None:
    """It fails where llama-cpp-python comes with another version, which PROTOCOL and the messages must then follow."""
    with socket.create_connection(("127.0.0.1", int(address.split(":")[1])), 5) as connection:
        connection.sendall(struct.pack("<BQ", 14, 24) + bytes(24))
        size, major, minor = struct.unpack("<QBB", connection.makefile("rb").read(10))  # whose parts may come apart
    assert (size, major, minor) == (28, *PROTOCOL)


def test_a_worker_tells_its_memory_and_whether_that_is_this_machines(address: str) -> None:
    (worker,) = find_workers([address])
    assert worker.devices == ((worker.free, psutil.virtual_memory().total),)
    assert worker.is_here and 0 < worker.round_trip_s < 1


def test_a_worker_that_serves_another_program_is_busy(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ANSWER_S", 0.5)
    with socket.create_connection(("127.0.0.1", int(address.split(":")[1])), 5) as connection:
        connection.sendall(struct.pack("<BQ", 14, 24) + bytes(24))
        assert connection.recv(36)
        with pytest.raises(BackendError, match="answers nobody: it serves another program"):
            ask_worker(address)
    assert ask_worker(address).devices


def test_nobody_listens() -> None:
    with pytest.raises(BackendError, match=r"^the worker 127\.0\.0\.1:\d+ cannot be reached: ") as refusal:
        ask_worker(f"127.0.0.1:{free_port()}")
    assert "edgespec worker" in refusal.value.hint


@pytest.mark.parametrize("version", [(8, 0, 0), (7, 1, 0), (3, 6, 1)])
def test_both_versions_of_the_protocol_are_named(version: tuple[int, int, int]) -> None:
    told = ".".join(map(str, version))
    said = rf"has version {told} of the protocol, and this machine 7\.0"
    with listening(lambda to: hello(to, version)) as address, pytest.raises(BackendError, match=said) as refusal:
        ask_worker(address)
    assert "same version of llama-cpp-python" in refusal.value.hint


def test_a_web_server_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ANSWER_S", 0.5)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(BackendError, match=r"does not speak as a worker|answers nobody"):
            ask_worker(f"127.0.0.1:{server.server_port}")


def test_a_server_that_hangs_up_is_no_worker() -> None:
    with listening(lambda connection: None) as address, pytest.raises(BackendError, match="does not speak as a worker"):
        ask_worker(address)


def test_an_unknown_name() -> None:
    with pytest.raises(BackendError, match=r"name of the worker nowhere\.invalid:50052 is not known"):
        ask_worker("nowhere.invalid:50052")


def test_two_names_of_one_worker(address: str) -> None:
    with pytest.raises(InvalidRequest, match="are one worker"):
        find_workers([address, address.replace("127.0.0.1", "localhost")])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("127.0.0.1:1,127.0.0.1:1", "named twice"),
        (",".join(f"127.0.0.1:{i + 1}" for i in range(9)), "9 workers are too many"),
        ("[::1]:50052", "not an IPv4 address"),
        ("", "no worker is named"),
        (" , ", "no worker is named"),
        ("10.0.0.2 10.0.0.3", "is not HOST:PORT"),
        ("http://10.0.0.2:50052", "is not HOST:PORT"),
        ("-oProxyCommand=x:1", "is not HOST:PORT"),
        ("127.0.0.1:http", "is not HOST:PORT"),
        ("127.0.0.1:70000", "is not HOST:PORT"),
        (":50052", "is not HOST:PORT"),
        ("10.0.0.2", r"10\.0\.0\.2:50052 is on a network\. .* insecure"),
        ("box.example:9", "is on a network"),
    ],
)
def test_addresses_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        LoadOptions(workers=split_addresses(text))


def test_other_machines_need_trust() -> None:
    assert LoadOptions(workers=split_addresses("10.0.0.2, box:9"), trusts_network=True).workers == (
        "10.0.0.2:50052",
        "box:9",
    )
    assert LoadOptions(workers=split_addresses("localhost,127.0.0.5:3")).alone == LoadOptions()


def lender(*sizes: int) -> Worker:
    return Worker("10.0.0.2:1", tuple((size, size) for size in sizes), 0.001)


def test_layers_are_divided_by_memory() -> None:
    here = Memory(8 * GIB + 2**29)  # of which 512 MiB are left to the system
    split = split_layers(32, [lender(16 * GIB + 2**29), lender(8 * GIB + 2**29)], here, None)
    assert (split.cpu, split.remote, split.gpus, split.hops) == (8, (16, 8), (), 2)
    assert split.describe([lender(1), lender(1)]) == "8 layers here, 16 on 10.0.0.2:1, 8 on 10.0.0.2:1"


def test_an_accelerator_takes_this_machines_part() -> None:
    here = Memory(64 * GIB, (DeviceMemory("GPU", 8 * GIB + 2**29, 12 * GIB),))
    split = split_layers(24, [lender(8 * GIB + 2**29, 8 * GIB + 2**29)], here, None)
    assert (split.cpu, split.workers, split.gpus, split.here, split.hops) == (0, ((8, 8),), (8,), 8, 2)


def test_gpu_layers_are_those_that_are_not_on_the_processor() -> None:
    assert split_layers(32, [lender(16 * GIB)], Memory(8 * GIB), 10) == split_layers(32, [lender(GIB)], Memory(0), 10)
    assert split_layers(32, [lender(16 * GIB)], Memory(8 * GIB), 10).remote == (10,)
    assert split_layers(32, [lender(16 * GIB)], Memory(8 * GIB), 99).cpu == 0
    with pytest.raises(InvalidRequest, match="the workers compute no layers"):
        split_layers(32, [lender(GIB)], Memory(GIB), 0)


@pytest.mark.parametrize(
    ("count", "sizes", "parts"),
    [(6, (1, 1), [3, 3]), (7, (1, 100), [1, 6]), (5, (0, 0), [3, 2]), (2, (5, 1, 1), [1, 1, 0]), (0, (1, 1), [0, 0])],
)
def test_every_part_has_a_layer_as_long_as_there_are_any(count: int, sizes: tuple[int, ...], parts: list[int]) -> None:
    assert divide(count, sizes) == parts
