"""What the server costs: a streamed chat's seconds against the engine's own, and the speed of concurrent calls.

    uv run python -m benchmarks.server [--tokens 200] [--repeats 7]
    uv run python -m benchmarks.server --model 1b.gguf --draft none --tokens 48

Starts `edgespec serve` and calls it with the real openai client over a socket. It reports the engine's decode time
(from `timings`) over the time from the first to the last event at the client. It also reports the time to the first
event, and tokens/s in total of 1, 2, 4 and 8 concurrent calls. stdout ends with one JSON line.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import openai

from benchmarks.harness import EDGESPEC, MODEL_PATH, print_result

PROMPT = "def read_lines(path):"
CONCURRENCY = (1, 2, 4, 8)


@click.command()
@click.option("--model", type=MODEL_PATH, help="[default: the embedded pair]")
@click.option("--draft", default="model", show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=200, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
def main(model: Path | None, draft: str, tokens: int, repeats: int) -> None:
    """Measure the server with one model."""
    ratios, firsts = [], []
    with start_server(model, draft) as client:
        time_stream(client, tokens)  # loads the model
        for _ in range(repeats):
            client_s, engine_s, first_s = time_stream(client, tokens)
            ratios.append(engine_s / client_s)
            firsts.append(first_s)
        together = {n: total_speed(client, n, tokens) for n in CONCURRENCY}
    spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    click.echo(f"engine's seconds / client's: {spread}; first event after {median(firsts) * 1e3:.1f} ms", err=True)
    for n, speed in together.items():
        click.echo(f"{n} concurrent: {speed:.1f} tok/s in total", err=True)
    result = {"engine_over_client": median(ratios), "first_s": median(firsts), "together": together}
    print_result("server", {**result, "tokens": tokens, "draft": draft}, *([model] if model else []))


@contextmanager
def start_server(model: Path | None, draft: str) -> Iterator[openai.OpenAI]:
    """A client of a new server, which ends with the context."""
    options = ["--port", "0", "--threads", "1", "--ctx", "1024", "--draft", draft, f"m={model or 'python-6m'}"]
    server = subprocess.Popen(
        [*EDGESPEC, "serve", *options], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    try:
        assert server.stdout is not None
        address = re.search(r"http://[^\s;]+", server.stdout.readline())
        if address is None:
            raise click.ClickException("edgespec serve did not start; run it alone to see why.")
        yield openai.OpenAI(base_url=address[0], api_key="none", max_retries=0, timeout=600)
    finally:
        server.terminate()
        server.wait(30)


def time_stream(client: openai.OpenAI, tokens: int) -> tuple[float, float, float]:
    """Seconds from the first to the last text at the client, the same by the engine, and up to the first text.

    Raises click.ClickException for an answer that arrives in one event.
    """
    start_s = perf_counter()
    arrivals: list[float] = []
    engine_ms = 0.0
    for chunk in client.chat.completions.create(**make_call(tokens), stream=True):
        if chunk.choices[0].delta.content:
            arrivals.append(perf_counter())
        engine_ms = (getattr(chunk, "timings", None) or {}).get("predicted_ms", engine_ms)
    if len(arrivals) < 2:
        raise click.ClickException("the answer arrived in one event; use more --tokens.")
    return arrivals[-1] - arrivals[0], engine_ms / 1000, arrivals[0] - start_s


def total_speed(client: openai.OpenAI, calls: int, tokens: int) -> float:
    """Tokens/s of `calls` concurrent calls together, prompts included in the time."""
    start_s = perf_counter()
    with ThreadPoolExecutor(calls) as pool:
        answers = list(pool.map(lambda _: client.chat.completions.create(**make_call(tokens)), range(calls)))
    return float(sum(each.usage.completion_tokens for each in answers)) / (perf_counter() - start_s)


def make_call(tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0}


if __name__ == "__main__":
    main()
