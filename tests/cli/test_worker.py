"""`edgespec worker`, and --workers of other commands."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec.cli.worker as command
from edgespec.backends.llamacpp.library import library
from edgespec.cli.serving_config import read_config
from edgespec.errors import BackendError, InvalidRequest
from edgespec.machines import workers
from tests.cli.conftest import Cli
from tests.workers import WorkerProcess, free_port, started_worker


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with started_worker() as made:
        yield made


def test_a_worker_says_what_it_lends_and_how_to_use_it() -> None:
    worker = WorkerProcess(free_port())
    output = worker.read_until("the client has left")
    assert worker.end(signal.SIGTERM)[0] == 0
    assert re.match(r"Lending CPU: .+, [\d.]+ [GM]iB free, 1 CPU thread\n", output)
    assert f"On another machine: ssh -N -L {worker.port}:127.0.0.1:{worker.port} USER@" in output
    assert f"edgespec chat REF --workers {worker.address}\n" in output
    assert (
        f"Listening at {worker.address}; press Ctrl-C to stop.\na client has connected\nthe client has left\n" in output
    )


def test_a_worker_listens_where_workers_are_looked_for() -> None:
    assert command.PORT == workers.PORT


def test_ctrl_c_ends_a_worker_beside_a_client() -> None:
    worker = WorkerProcess(free_port())
    with socket.create_connection(("127.0.0.1", worker.port)):
        code, output = worker.end(signal.SIGINT)
    assert code == 130 and "Traceback" not in output


def test_a_crash_of_a_worker_is_told() -> None:
    code, output = WorkerProcess(free_port()).end(signal.SIGSEGV)
    assert code == BackendError.exit_code
    assert "error: The engine's process ended with SIGSEGV" in output and "hint: Start it again.\n" in output


def test_a_worker_on_a_network_says_what_that_means(cli: Cli) -> None:
    refused = cli("worker", "--host", "0.0.0.0")
    assert refused.returncode == 2
    assert "call this protocol insecure" in refused.stderr and "--trust-network" in refused.stderr
    worker = WorkerProcess(free_port(), "--host", "0.0.0.0", "--trust-network")
    _, output = worker.end()
    assert f":{worker.port} --trust-network\n" in output and "warning: llama.cpp's authors call this" in output


def test_a_port_in_use(worker: WorkerProcess, cli: Cli) -> None:
    refused = cli("worker", "--port", str(worker.port))
    assert refused.returncode == 2
    assert f"annot listen on 127.0.0.1, port {worker.port}: Address already in use." in refused.stderr
    assert "hint: Choose another --port or --host." in refused.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "CUDA9"], "llama.cpp finds no device 'CUDA9'.\nhint: It finds CPU"),
        (["--host", "::1"], "'::1' is no IPv4 address"),
        (["--port", "0"], "--port"),
    ],
)
def test_options_that_are_refused(options: list[str], words: str, cli: Cli) -> None:
    refused = cli("worker", *options)
    assert refused.returncode == 2 and words in refused.stderr


def test_a_build_without_rpc_names_the_command_that_adds_it(
    worker: WorkerProcess, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library().api, "llama_supports_rpc", lambda: False)
    refused = cli("worker")
    assert refused.returncode == 7
    assert "This build of llama.cpp has no RPC, which workers need.\nhint: CMAKE_ARGS=" in refused.stderr
    assert "-DGGML_RPC=on" in refused.stderr and "llama-cpp-python" in refused.stderr


def test_the_plan_of_a_divided_model(worker: WorkerProcess, cli: Cli) -> None:
    done = cli("plan", "--workers", worker.address, "--threads", "1", "--json")
    plan = json.loads(done.stdout)
    (lent,) = plan["workers"]
    assert (lent["address"], lent["is_this_machine"]) == (worker.address, True)
    assert lent["layers"] + plan["layers_here"] == 6 and min(lent["layers"], plan["layers_here"]) > 0
    assert plan["network_bytes_per_row"] == 2 * 4 * 256 and plan["network_ms"] == lent["round_trip_ms"] > 0
    assert plan["speedup_without_network"].keys() == plan["speedup_at_acceptance"].keys()
    text = cli("plan", "--workers", worker.address, "--no-speed").stdout
    lines = rf"  layers: \d here\n          \d on {re.escape(worker.address)} \(this machine's memory, round trip "
    assert re.search(lines, text)
    assert "  network: " in text and "ms in every forward, however many rows it has, and 2 KiB for each row" in text


def test_run_over_a_worker(worker: WorkerProcess, cli: Cli) -> None:
    options = ["run", "def fib(n):", "--max-tokens", "30", "--temperature", "0", "--threads", "1", "--no-memory"]
    divided = cli(*options, "--workers", worker.address)
    assert divided.stdout == cli(*options).stdout
    assert re.search(
        rf"^note: \d layers? here, \d on {worker.address}; the network adds ", divided.stderr, re.MULTILINE
    )


def test_workers_compute_with_llama_cpp(worker: WorkerProcess, cli: Cli) -> None:
    refused = cli("run", "x", "--workers", worker.address, "--backend", "mlx")
    assert refused.returncode == 2 and "Workers compute with llama.cpp, not MLX." in refused.stderr


def test_the_table_of_a_served_model_names_workers(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[big]\nmodel = "big.gguf"\nworkers = "10.0.0.2,10.0.0.3:9"\ntrust-network = true\n')
    table = read_config(path)["big"]
    assert table.config.load.workers == ("10.0.0.2:50052", "10.0.0.3:9")  # type: ignore[union-attr]
    path.write_text('[big]\nmodel = "big.gguf"\nworkers = "10.0.0.2"\n')
    with pytest.raises(InvalidRequest, match="is on a network"):
        read_config(path)
