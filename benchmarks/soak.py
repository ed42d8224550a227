"""Hold a load for hours: clients of every kind, cancels, schemas, tools, swaps of models, and kills of the engine.

    uv run python -m benchmarks.soak [--minutes 120] [--model NAME=FILE ...] [--streams 8] [--kill-every 300]

Every stream sends one request after another, drawn from the bodies of OpenAI's, Anthropic's and Ollama's clients. An
answer is whole, or its failure is told: by a status, or by an event within the stream. Anything else is lost. Every
`--kill-every` seconds one engine process is killed; then each model has to answer, and in the end the memory has to
have every text that was answered more than five seconds before a kill.

stderr has a line for each part of the time: what came of the requests, memory in MiB, threads, open files and stored
files of the server with its engines. stdout ends with one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import click
import httpx
import psutil

from benchmarks.harness import EDGESPEC, REPOSITORY, TARGET, print_result
from benchmarks.server_load import serve_in

WORDS = [
    "list",
    "file",
    "queue",
    "number",
    "parser",
    "thread",
    "socket",
    "matrix",
    "reader",
    "string",
    "module",
    "error",
    "value",
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
_STORED_S = 5.0  # after which an answered text is in the memory
_TIMEOUT_S = 300.0


class Lost(Exception):
    """An answer that neither was whole nor said why."""


@dataclass
class Load:
    """The clients' side: the server, what came of the requests, and the markers of texts that were answered."""

    client: httpx.AsyncClient
    models: list[str]
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    answered: list[tuple[float, str]] = field(default_factory=list)

    def text(self, marker: str = "") -> str:
        return f"{marker} Write about a {' '.join(self.rng.choices(WORDS, k=self.rng.choice((4, 12, 60))))}."

    async def run_stream(self, until_s: float) -> None:
        kinds = list(KINDS)
        while monotonic() < until_s:
            kind = self.rng.choice(kinds)
            try:
                end = await KINDS[kind](self, self.rng.choice(self.models))
            except (Lost, httpx.HTTPError, KeyError, ValueError) as error:
                end = "lost"
                self.reasons[f"{kind}: {type(error).__name__}: {error}"[:200]] += 1
            self.counts[end] += 1

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The JSON of an answer; None for a failure that was told."""
        response = await self.client.post(path, json=body)
        found: dict[str, Any] = response.json()
        if response.status_code == 200:
            return found
        self._note(path, response.status_code, found)
        return None

    async def read(self, path: str, body: dict[str, Any], *, most: int = 10**6) -> list[dict[str, Any]] | None:
        """The events of a stream, of which `most` are read; None for a failure that was told, also by an event."""
        events: list[dict[str, Any]] = []
        async with self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                self._note(path, response.status_code, json.loads(await response.aread()))
                return None
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ").strip()
                if not data.startswith("{"):
                    continue
                event = json.loads(data)
                if event.get("error") or event.get("type") in ("error", "response.failed"):
                    self._note(path, 200, event)
                    return None
                events.append(event)
                if len(events) >= most:
                    break
        return events

    def _note(self, path: str, status: int, body: dict[str, Any]) -> None:
        error = body.get("error") or body.get("response", {}).get("error") or body
        message = error.get("message", "") if isinstance(error, dict) else str(error)
        if not message:
            raise Lost(f"{path} {status} without a message: {body}")
        self.reasons[f"{status} {message}"[:160]] += 1


async def _chat(load: Load, model: str, **more: Any) -> tuple[list[dict[str, Any]] | None, str]:
    marker = f"m{load.rng.getrandbits(40):x}"
    messages = [{"role": "user", "content": load.text(marker)}]
    body = {"model": model, "messages": messages, "max_tokens": 40, "stream": True, **more}
    return await load.read("/v1/chat/completions", body), marker


async def stream_chat(load: Load, model: str) -> str:
    events, marker = await _chat(load, model, temperature=load.rng.choice((0, 0.8)))
    if events is None:
        return "told"
    if not any(each["choices"] and each["choices"][0].get("finish_reason") for each in events):
        raise Lost("no finish_reason")
    load.answered.append((monotonic(), marker))
    return "whole"


async def cancel(load: Load, model: str) -> str:
    body = {"model": model, "prompt": load.text(), "max_tokens": 400, "stream": True}
    return "told" if await load.read("/v1/completions", body, most=load.rng.randint(1, 20)) is None else "cancelled"


async def complete(load: Load, model: str) -> str:
    found = await load.post("/v1/completions", {"model": model, "prompt": load.text() * 20, "max_tokens": 24})
    return "told" if found is None else _whole(found["choices"][0]["finish_reason"])


async def follow_schema(load: Load, model: str) -> str:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": load.text()}]
    body = {"model": model, "messages": messages, "max_tokens": 60, "response_format": format_}
    if (found := await load.post("/v1/chat/completions", body)) is None:
        return "told"
    choice = found["choices"][0]
    if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) < {"a", "b"}:
        raise Lost("another schema")
    return _whole(choice["finish_reason"])


async def call_tool(load: Load, model: str) -> str:
    messages = [{"role": "user", "content": load.text()}]
    more = {"tools": [TOOL], "tool_choice": "required"}
    body = {"model": model, "messages": messages, "max_tokens": 80, **more}
    if (found := await load.post("/v1/chat/completions", body)) is None:
        return "told"
    choice = found["choices"][0]
    if choice["finish_reason"] == "tool_calls":
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    return _whole(choice["finish_reason"])


async def stream_anthropic(load: Load, model: str) -> str:
    messages = [{"role": "user", "content": load.text()}]
    events = await load.read("/v1/messages", {"model": model, "messages": messages, "max_tokens": 30, "stream": True})
    return "told" if events is None else _whole(events[-1].get("type") == "message_stop")


async def respond(load: Load, model: str) -> str:
    found = await load.post("/v1/responses", {"model": model, "input": load.text(), "max_output_tokens": 30})
    return "told" if found is None else _whole(found["status"] in ("completed", "incomplete"))


async def chat_ollama(load: Load, model: str) -> str:
    messages = [{"role": "user", "content": load.text()}]
    body = {"model": model, "messages": messages, "options": {"num_predict": 30}, "stream": False}
    found = await load.post("/api/chat", body)
    return "told" if found is None else _whole(found["done"])


async def embed(load: Load, model: str) -> str:
    found = await load.post("/v1/embeddings", {"model": model, "input": [load.text(), load.text()]})
    return "told" if found is None else _whole(len(found["data"]) == 2)


async def ask_wrongly(load: Load, model: str) -> str:
    body = load.rng.choice(({"temperature": "hot"}, {"max_tokens": -5}, {"messages": "none"}, {"model": "no-such"}))
    messages = [{"role": "user", "content": "x"}]
    found = await load.post("/v1/chat/completions", {"model": model, "messages": messages, **body})
    if found is not None:
        raise Lost(f"{body} was taken")
    return "told"


async def unload(load: Load, model: str) -> str:
    if load.rng.random() < 0.7:  # seldom, so that the caches of slots are used too
        return await complete(load, model)
    found = await load.post("/api/generate", {"model": model, "keep_alive": 0})
    return "told" if found is None else _whole(found["done"])


def _whole(is_whole: object) -> str:
    if not is_whole:
        raise Lost("no end")
    return "whole"


KINDS: dict[str, Callable[[Load, str], Awaitable[str]]] = {
    each.__name__: each
    for each in (
        *(stream_chat, cancel, complete, follow_schema, call_tool, stream_anthropic),
        *(respond, chat_ollama, embed, ask_wrongly, unload),
    )
}


@dataclass
class Watch:
    """The server's side: its processes and folder.

    kills     when an engine was killed
    answered  models that answered after it, in all
    """

    server: psutil.Process
    folder: Path
    kills: list[float] = field(default_factory=list)
    answered: int = 0

    def engines(self) -> list[psutil.Process]:
        """The processes that hold models, which are the largest ones."""
        found = [each for each in self.server.children(recursive=True) if each.memory_info().rss > 60 * 2**20]
        return sorted(found, key=lambda each: each.memory_info().rss, reverse=True)

    def sample(self) -> dict[str, int]:
        rows = {"rss_mib": 0, "threads": 0, "open_files": 0}
        for each in (self.server, *self.server.children(recursive=True)):
            with suppress(psutil.Error):
                rows["rss_mib"] += each.memory_info().rss // 2**20
                rows["threads"] += each.num_threads()
                rows["open_files"] += each.num_fds()
        files = [path.stat().st_size for path in self.folder.rglob("*") if path.is_file()]
        return {**rows, "files": len(files), "files_mib": sum(files) // 2**20}

    async def kill_one(self, load: Load) -> None:
        """Kill an engine. Of the next two requests to each model the second at least has to be answered."""
        if not (engines := self.engines()):
            return
        load.rng.choice(engines[:2]).send_signal(signal.SIGKILL)
        self.kills.append(monotonic())
        for model in load.models:
            await stream_chat(load, model)  # it may be the one that hears of the end
            self.answered += await stream_chat(load, model) == "whole"


async def hold(load: Load, watch: Watch, streams: int, minutes: float, kill_every: float, parts: int) -> list[Any]:
    """The rows of the table."""
    start_s = monotonic()
    end_s = start_s + 60 * minutes
    callers = [asyncio.create_task(load.run_stream(end_s)) for _ in range(streams)]
    killer = asyncio.create_task(_kill_often(load, watch, kill_every, end_s))
    rows = []
    for part in range(parts):
        before = load.counts.copy()
        await asyncio.sleep(max(0.0, start_s + 60 * minutes * (part + 1) / parts - monotonic()))
        row = {"minutes": round((monotonic() - start_s) / 60, 1), **(load.counts - before), **watch.sample()}
        click.echo("  ".join(f"{name} {value}" for name, value in row.items()), err=True)
        rows.append(row)
    await asyncio.gather(*callers, killer)
    return rows


async def _kill_often(load: Load, watch: Watch, every_s: float, end_s: float) -> None:
    while monotonic() + every_s < end_s:
        await asyncio.sleep(every_s)
        await watch.kill_one(load)


def list_forgotten(load: Load, watch: Watch, data: Path) -> int:
    """Texts that were answered well before a kill and are not in the memory. The server has ended."""
    path = data.with_suffix(".jsonl")
    environment = {**os.environ, "EDGESPEC_DATA_DIR": str(data)}
    subprocess.run([*EDGESPEC, "memory", "export", str(path)], env=environment, check=True, capture_output=True)
    known = path.read_text()
    is_due = [all(not at_s <= kill_s <= at_s + _STORED_S for kill_s in watch.kills) for at_s, _ in load.answered]
    return sum(marker not in known for (_, marker), due in zip(load.answered, is_due, strict=True) if due)


@click.command()
@click.option("--minutes", type=float, default=120.0, show_default=True)
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True)
@click.option("--kill-every", type=float, default=300.0, show_default=True, help="Seconds.")
@click.option("--model", "models", multiple=True, help="NAME=FILE. [default: the embedded target]")
@click.option("--draft", default="auto", show_default=True)
@click.option("--parts", type=click.IntRange(1), default=12, show_default=True, help="Lines of the table.")
@click.option("--threads", default=1, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(
    minutes: float,
    streams: int,
    kill_every: float,
    models: tuple[str, ...],
    draft: str,
    parts: int,
    threads: int,
    seed: int,
) -> None:
    """Hold a load, and tell what became of it. The exit code is 1 if anything was lost."""
    chosen = models or (f"pair={TARGET}",)
    options = ["--threads", threads, "--ctx", 2048, "--draft", draft, "--memory", *chosen]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        with serve_in(str(data), REPOSITORY, list(map(str, options))) as (port, process):
            names = [each.partition("=")[0] for each in chosen]
            watch = Watch(psutil.Process(process), Path(folder))
            rows, load = asyncio.run(_run(port, names, watch, streams, minutes, kill_every, parts, seed))
        forgotten = list_forgotten(load, watch, data)
    for reason, count in load.reasons.most_common(20):
        click.echo(f"{count:6} {reason}", err=True)
    kills = len(watch.kills)
    result = {"rows": rows, "totals": dict(load.counts), "kills": kills, "answered_after": watch.answered}
    print_result("soak", {**result, "models": len(names), "remembered": len(load.answered), "forgotten": forgotten})
    sys.exit(load.counts["lost"] > 0 or forgotten > 0 or watch.answered < kills * len(names))


async def _run(
    port: int,
    names: list[str],
    watch: Watch,
    streams: int,
    minutes: float,
    kill_every: float,
    parts: int,
    seed: int,
) -> tuple[list[Any], Load]:
    limits = httpx.Limits(max_connections=4 * streams)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S, limits=limits) as client:
        load = Load(client, names, random.Random(seed))
        return await hold(load, watch, streams, minutes, kill_every, parts), load


if __name__ == "__main__":
    main()
