"""The network of namespaces delays and drops packets of real connections, or says why it cannot be made."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks.slow_link import SlowLink, find_obstacle
from tests.benchmarks.conftest import Program

pytestmark = pytest.mark.slow

SERVE = """
import socket
with socket.create_server((ADDRESS, 4000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    with connection:
        while block := connection.recv(65536):
            connection.sendall(block)
"""
ASK = """
import socket
data = bytes(range(256)) * 400
with socket.create_connection((ADDRESS, 4000), timeout=30) as connection:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    got = b"".join(iter(lambda: connection.recv(65536), b""))
print(got == data)
"""

OBSTACLE = find_obstacle()
needs_namespaces = pytest.mark.skipif(OBSTACLE is not None, reason=f"no network of namespaces here: {OBSTACLE}")


@pytest.mark.skipif(OBSTACLE is None, reason="namespaces can be made here")
def test_a_machine_without_namespaces_gets_the_reason() -> None:
    with pytest.raises(OSError, match=re.escape(str(OBSTACLE))):
        SlowLink()


@needs_namespaces
def test_a_packet_is_never_early(program: Program) -> None:
    assert program("benchmarks.slow_link", "--rtt-ms", 8)["median_ms"] >= 8.0


@needs_namespaces
def test_a_connection_survives_loss() -> None:
    with SlowLink(3, is_lossy=True) as link:
        link.set(0.002, 0.03)
        address = f"ADDRESS = {link.address(2)!r}\n"
        serve = link.command(2, [sys.executable, "-c", address + SERVE])
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            ask = link.command(1, [sys.executable, "-c", address + ASK])
            assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout == "True\n"
