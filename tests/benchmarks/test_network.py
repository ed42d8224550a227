"""The network of namespaces delays and drops packets, and the benchmarks of several machines run on it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks.slow_link import SlowLink, find_obstacle
from tests.benchmarks.conftest import Program

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


@needs_namespaces
def test_workers(program: Program) -> None:
    sizes = ("--prompts", 1, "--tokens", 12, "--repeats", 1)
    result = program("benchmarks.workers", "--workers", 2, "--rtt-ms", 30, *sizes)
    assert len(result["files"]) == 2 and [row["set_ms"] for row in result["delays"]] == [0.0, 30.0]
    near, far = result["delays"]
    assert near["texts"] == 2 and near["other_texts"] == near["near_ties"] and far["other_texts"] == far["near_ties"]
    assert far["plain"]["round_s"] >= 0.060 > near["plain"]["round_s"], "two workers, each of a round trip"
    assert far["formula_gain"] > 1 and far["plain"]["gain"] == 1.0


@needs_namespaces
def test_workers_on_a_lossy_network(program: Program) -> None:
    sizes = ("--prompts", 1, "--tokens", 8, "--repeats", 1)
    result = program("benchmarks.workers", "--rtt-ms", 5, "--loss", 0.02, "--autopilot", *sizes)
    assert result["short_packets"] and result["delays"][1]["other_texts"] == result["delays"][1]["near_ties"]
    assert result["delays"][1]["autopilot"]["tokens_per_second"] > 0


@needs_namespaces
def test_ring(program: Program) -> None:
    result = program("benchmarks.ring", "--ranks", 2, "--rtt-ms", 10, "--prompts", 1, "--tokens", 6, "--repeats", 1)
    assert [row["set_ms"] for row in result["delays"]] == [0.0, 10.0]
    for row in result["delays"]:
        assert row["texts"] == 2 and row["other_texts"] == row["near_ties"]
    far = result["delays"][1]
    assert far["network_s"] > 0 and far["formula_gain"] > 0 and far["plain"]["gain"] == 1.0
