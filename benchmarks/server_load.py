"""The server under load, beside llama.cpp's `llama-server`: time to the first token, and tokens/s of all streams.

    uv run python -m benchmarks.server_load --llama-server PATH [--model T.gguf] [--streams 1,4,16,64] [--repeats 5]
    uv run python -m benchmarks.server_load --checkout ../other --server-cores 0,1
    uv run python -m benchmarks.server_load --front

Every arm is a server process with the same model file, threads and context. For each number of streams, that many
callers each make calls one after another at /v1/completions, greedy and streamed; every prompt is a new one. The arms
take turns, in reverse order on every second repeat. The client is one process that reads from sockets and parses few of
the events; give the servers cores of their own where the machine has some to spare.

With --front one more arm is the last server behind an `edgespec serve` that passes requests on to it.

Columns: milliseconds from a call to its first text (median, 95th percentile), tokens/s of all streams together, and the
median, over repeats, of the ratio to the last peer. stdout ends with one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np
import psutil

from benchmarks.harness import EDGESPEC, MODEL_PATH, REPOSITORY, TARGET, print_result
from benchmarks.peers_server import LlamaServer, read_help
from edgespec.backends.options import LoadOptions

PROMPTS = ("def read_lines(path):", "class Queue:\n    def __init__(self", "import os\n\ndef walk(", "def mean(values")
_numbers = count()


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs, and the fields that its bodies have besides those of all."""

    name: str
    port: int
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """What the callers saw: seconds to the first text of each call, tokens of all, and the seconds of it all."""

    firsts_s: list[float]
    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@click.command()
@click.option("--model", type=MODEL_PATH, default=TARGET, help="[default: the embedded target]")
@click.option("--draft", default="none", show_default=True, help="Of edgespec.")
@click.option("--llama-server", "binary", help="Name on PATH, or path.")
@click.option(
    "--checkout", type=click.Path(exists=True, path_type=Path), help="Another version of edgespec, to compare."
)
@click.option("--front", "has_front", is_flag=True, help="Also edgespec serve in front of the last server.")
@click.option("--streams", default="1,4,16,64", show_default=True, help="Numbers of callers.")
@click.option("--calls", type=click.IntRange(1), default=3, show_default=True, help="Of each caller.")
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--ctx", type=click.IntRange(64), default=512, show_default=True, help="Of each stream.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--server-cores", help="Processors for the servers, such as 0,1; the client keeps the others.")
def main(
    model: Path,
    draft: str,
    binary: str | None,
    checkout: Path | None,
    has_front: bool,
    streams: str,
    calls: int,
    tokens: int,
    repeats: int,
    ctx: int,
    threads: int,
    server_cores: str | None,
) -> None:
    """Measure a server with each number of streams."""
    counts = [int(n) for n in streams.split(",")]
    load = LoadOptions(threads=threads, context_size=ctx, caches=max(counts))
    with ExitStack() as stack:
        if server_cores:
            stack.enter_context(use_cores(server_cores))
        servers = [stack.enter_context(start_edgespec("edgespec", REPOSITORY, model, draft, load))]
        if checkout:
            servers.append(stack.enter_context(start_edgespec(f"edgespec of {checkout}", checkout, model, draft, load)))
        if binary:
            servers.append(stack.enter_context(start_llama_server(binary, model, load)))
        if has_front:
            servers.insert(-1, stack.enter_context(start_front(servers[-1])))
        if server_cores:
            leave_cores(server_cores)
        for server in servers:
            asyncio.run(run_callers(server, max(counts), 1, 8))  # loads the model
        rows = [row for n in counts for row in measure(servers, n, calls, tokens, repeats)]
    result = {"rows": rows, "draft": draft, "tokens": tokens, "calls": calls, "threads": threads}
    print_result("server_load", result, model)


def measure(servers: Sequence[Server], n: int, calls: int, tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A row of figures for each server with `n` callers, also printed on stderr."""
    runs: dict[str, list[Run]] = {server.name: [] for server in servers}
    for repeat in range(repeats):
        for server in servers if repeat % 2 else servers[::-1]:
            runs[server.name].append(asyncio.run(run_callers(server, n, calls, tokens)))
    peer = runs[servers[-1].name]
    for name, each in runs.items():
        firsts_ms = np.array([first_s * 1e3 for run in each for first_s in run.firsts_s])
        p50, p95 = np.percentile(firsts_ms, (50, 95)).tolist()
        speed = median(run.speed for run in each)
        ratios = [run.speed / other.speed for run, other in zip(each, peer, strict=True)]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        click.echo(f"{n:3} streams  {name:30} {p50:7.1f} {p95:7.1f} ms {speed:8.0f} tok/s  {spread}", err=True)
        yield {"streams": n, "server": name, "first_ms": p50, "first_p95_ms": p95, "speed": speed, "ratios": ratios}


async def run_callers(server: Server, n: int, calls: int, tokens: int) -> Run:
    """`n` callers, who each make `calls` calls one after another."""

    async def call_often() -> list[tuple[float, int]]:
        return [await call(server, tokens) for _ in range(calls)]

    start_s = perf_counter()
    answers = [answer for each in await asyncio.gather(*(call_often() for _ in range(n))) for answer in each]
    seconds = perf_counter() - start_s
    return Run([first_s for first_s, _ in answers], sum(emitted for _, emitted in answers), seconds)


async def call(server: Server, tokens: int) -> tuple[float, int]:
    """Seconds to the first text of an answer, and its tokens. Raises click.ClickException for an error."""
    number = next(_numbers)
    prompt = f"# {number * 7919 % 100_000}\n{PROMPTS[number % len(PROMPTS)]}"
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **server.extra}
    data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    start_s = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    first_s, usage = 0.0, b""
    async for line in reader:
        if line.startswith(b"data: {"):
            if not first_s:
                event = json.loads(line[6:])
                if "error" in event:
                    raise click.ClickException(f"{server.name} answered: {event['error']}")
                first_s = perf_counter() - start_s if event["choices"][0]["text"] else 0.0
            usage = line
    writer.close()
    if not first_s:
        raise click.ClickException(f"{server.name} has sent no text.")
    return first_s, int(json.loads(usage[6:])["usage"]["completion_tokens"])


@contextmanager
def start_edgespec(name: str, checkout: Path, model: Path, draft: str, load: LoadOptions) -> Iterator[Server]:
    """A new server of the package in `checkout`."""
    options = ["--threads", load.threads, "--ctx", load.context_size, "--parallel", load.caches]
    with run_edgespec(checkout, [*map(str, options), "--draft", draft, f"m={model}"]) as port:
        yield Server(name, port, {})


@contextmanager
def start_front(server: Server) -> Iterator[Server]:
    """A new edgespec that passes requests on to `server`, with the same extra fields."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "models.toml"
        config.write_text(f'[m]\nbackend = "openai"\nurl = "http://127.0.0.1:{server.port}/v1"\n')
        with run_edgespec(REPOSITORY, ["--config", str(config)]) as port:
            yield Server(f"edgespec, {server.name}", port, server.extra)


@contextmanager
def run_edgespec(checkout: Path, arguments: Sequence[str]) -> Iterator[int]:
    """The port of a new `edgespec serve`. What it keeps of the texts is removed at the end."""
    with tempfile.TemporaryDirectory() as data, serve_in(data, checkout, arguments) as (port, _):
        yield port


@contextmanager
def serve_in(data: str, checkout: Path, arguments: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The port and process id of a new `edgespec serve`, which keeps texts in the folder `data`."""
    process = subprocess.Popen(
        [*EDGESPEC, "serve", "--port", "0", *arguments],
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), *sys.path]), "EDGESPEC_DATA_DIR": data},
    )
    try:
        assert process.stdout is not None
        port = re.search(r"http://[^\s;]+:(\d+)", process.stdout.readline())
        if port is None:
            raise click.ClickException("edgespec serve did not start; run it alone to see why.")
        yield int(port[1]), process.pid
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def start_llama_server(binary: str, model: Path, load: LoadOptions) -> Iterator[Server]:
    """A new llama-server. Raises PeerFailed."""
    with tempfile.TemporaryDirectory() as logs:
        server = LlamaServer(binary, read_help(binary), "plain", [], model, None, load, Path(logs))
        try:
            yield Server("llama-server", server.port, {"samplers": ["temperature"]})
        finally:
            server.close()


@contextmanager
def use_cores(cores: str) -> Iterator[None]:
    """This process, and those that it starts, run on `cores`."""
    process = psutil.Process()
    before = process.cpu_affinity()
    process.cpu_affinity([int(core) for core in cores.split(",")])
    try:
        yield
    finally:
        process.cpu_affinity(before)


def leave_cores(cores: str) -> None:
    psutil.Process().cpu_affinity([n for n in range(psutil.cpu_count() or 1) if str(n) not in cores.split(",")])


if __name__ == "__main__":
    main()
