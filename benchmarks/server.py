"""What the server costs: tokens/s of streamed chats against the engine's own, and many calls at once.

    uv run python -m benchmarks.server [--tokens 200] [--repeats 7]
    uv run python -m benchmarks.server --model 1b.gguf --draft none --tokens 48

Starts `edgespec serve`, asks through the real openai client over a socket, and compares the time from the first to the
last event that the client sees with the engine's own account in `timings`, and tokens/s of 1, 2, 4, 8 calls at once.
stdout ends with one JSON line.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import openai

from benchmarks.machine import describe

_SERVE = [sys.executable, "-c", "from edgespec.cli.main import main; main()", "serve", "--port", "0", "--threads", "1"]
PROMPT = "def read_lines(path):"


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Default: the embedded pair.")
@click.option("--draft", default="model", show_default=True)
@click.option("--tokens", default=200, show_default=True)
@click.option("--repeats", default=7, show_default=True)
def main(model: Path | None, draft: str, tokens: int, repeats: int) -> None:
    named = [f"m={model}"] if model else ["m="]
    server = subprocess.Popen([*_SERVE, "--ctx", "1024", "--draft", draft, *named], stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found
        client = openai.OpenAI(base_url=found[0].rstrip(";"), api_key="none", max_retries=0, timeout=600)
        _timed(client, tokens)  # opens the model
        ratios, firsts = [], []
        for _ in range(repeats):
            seen_s, own_s, first_s = _timed(client, tokens)
            ratios.append(own_s / seen_s)
            firsts.append(first_s)
        click.echo(f"engine's seconds / client's: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        click.echo(f"to the first event: {median(firsts) * 1000:.1f} ms")
        together = {n: _together(client, n, tokens) for n in (1, 2, 4, 8)}
        for n, speed in together.items():
            click.echo(f"{n} at once: {speed:.1f} tok/s in all")
    finally:
        server.terminate()
        server.wait(30)
    click.echo(json.dumps({"benchmark": "server", "engine_over_client": median(ratios), "first_s": median(firsts),
                           "together": together, "tokens": tokens, "draft": draft,
                           **describe(*([model] if model else []))}))  # fmt: skip


def _timed(client: openai.OpenAI, tokens: int) -> tuple[float, float, float]:
    """Seconds from first to last text as the client sees it, as the engine counts it, and to the first text."""
    began_s = perf_counter()
    at_s: list[float] = []
    own_ms = 0.0
    for chunk in client.chat.completions.create(**_call(tokens), stream=True):
        if chunk.choices[0].delta.content:
            at_s.append(perf_counter())
        own_ms = (getattr(chunk, "timings", None) or {}).get("predicted_ms", own_ms)
    return at_s[-1] - at_s[0], own_ms / 1000, at_s[0] - began_s


def _together(client: openai.OpenAI, calls: int, tokens: int) -> float:
    began_s = perf_counter()
    with ThreadPoolExecutor(calls) as pool:
        done = list(pool.map(lambda _: client.chat.completions.create(**_call(tokens)), range(calls)))
    return sum(each.usage.completion_tokens for each in done) / (perf_counter() - began_s)


def _call(tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0}


if __name__ == "__main__":
    main()
