"""What the whole screen costs: tokens/s of `edgespec chat` against `edgespec run`, CPU, and latency to the screen.

    uv run python -m benchmarks.tui                        # the embedded pair
    uv run python -m benchmarks.tui --model 1b.gguf --tokens 64 --draft none
    uv run python -m benchmarks.tui --latency              # the toy backend, as fast as it goes

The first two drive the real commands on pseudo-terminals of 120x40, a run and an answer of the chat in turn; the chat's
speed is read from its stored conversation. `--latency` runs the app in this process without a terminal: from the moment
a token was emitted to the end of the refresh that shows it, and the CPU seconds of the thread that draws.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, perf_counter, sleep, thread_time

import click

from benchmarks.machine import describe
from edgespec.conversations import Store
from edgespec.conversations.chat import Chat
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.planner.plan import LoadConfig
from edgespec.service.process import EngineProcess
from edgespec.tui.app import ChatApp
from edgespec.tui.messages import Batch

PROMPT = "def read_lines(path):"
_EDGESPEC = [sys.executable, "-c", "from edgespec.cli.main import main; main()"]


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Default: the embedded pair.")
@click.option("--draft", default="none", show_default=True)
@click.option("--tokens", type=int, default=200, show_default=True)
@click.option("--repeats", type=int, default=5, show_default=True)
@click.option("--latency", is_flag=True)
def main(model: Path | None, draft: str, tokens: int, repeats: int, latency: bool) -> None:
    result = latencies(max(tokens, 4000)) if latency else slowdown(model, draft, tokens, repeats)
    click.echo(json.dumps({"benchmark": "tui", **result, **describe(*([model] if model else []))}))


def slowdown(model: Path | None, draft: str, tokens: int, repeats: int) -> dict[str, object]:
    """Tokens/s of both commands, interleaved, each the speed after the first token."""
    options = ["--temperature", "0", "--max-tokens", str(tokens), "--threads", "1", "--ctx", "1024", "--draft", draft]
    ratios, pairs = [], []
    with tempfile.TemporaryDirectory() as data:
        environment = {**os.environ, "EDGESPEC_DATA_DIR": data, "TERM": "xterm-256color"}
        screen = Terminal([*_EDGESPEC, "chat", *([str(model)] if model else []), *options], environment)
        try:
            for i in range(repeats + 1):
                run = _run(model, options, environment)
                screen.type(f"{PROMPT}\r")
                chat = _stored(Path(data) / "conversations.db", i + 1)
                screen.type("/new\r")
                sleep(0.5)
                if i:  # the first warms up
                    pairs.append((round(run, 2), round(chat, 2)))
                    ratios.append(chat / run)
                    click.echo(f"run {run:7.2f}  chat {chat:7.2f} tok/s  {chat / run:.3f}")
        finally:
            screen.close()
    click.echo(f"chat / run: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return {"chat_over_run": median(ratios), "pairs": pairs, "tokens": tokens, "draft": draft}


def _run(model: Path | None, options: list[str], environment: dict[str, str]) -> float:
    command = [*_EDGESPEC, "run", PROMPT, *(["--model", str(model)] if model else []), *options, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["metrics"]["tokens_per_second"])


def _stored(database: Path, count: int) -> float:
    """The speed that is stored with the last answer, once there are `count` finished ones."""
    until = monotonic() + 600
    while monotonic() < until:
        sleep(0.2)
        if not database.exists():
            continue
        store = Store.open(database)
        try:
            answers = [turn for each in store.recent() for turn in store.turns(each) if turn.role == "assistant"]
        finally:
            store.close()
        finished = sorted((turn for turn in answers if turn.finished), key=lambda turn: turn.id)
        if len(finished) >= count:
            return float(finished[-1].metrics["tokens_per_second"])
    raise click.ClickException("the chat did not answer")


class Terminal:
    """A child on a pseudo-terminal of 120x40, whose output is read and thrown away."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self._child = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.bytes = 0
        threading.Thread(target=self._drain, daemon=True).start()
        sleep(8)  # until the model is open; what is typed before would be refused

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> None:
        self.type("\x11")
        self._child.wait(timeout=30)

    def _drain(self) -> None:
        try:
            while data := os.read(self._fd, 65536):
                self.bytes += len(data)
        except OSError:
            return


class Watched(ChatApp):
    """Notes when each token was emitted and when it had been drawn."""

    waits: list[float]
    stopped_s: float | None = None

    def on_batch(self, message: Batch) -> None:
        emitted = [event.at_s for event in message.events if isinstance(event, Step)]
        self.call_after_refresh(lambda: self.waits.extend(perf_counter() - at_s for at_s in emitted))


def latencies(tokens: int) -> dict[str, object]:
    """The toy backend, as fast as it goes."""

    async def body() -> dict[str, object]:
        chat = Chat(None, SamplingParams(temperature=0, logit_bias=((256, -1000.0),)), tokens, None, ())
        app = Watched(LoadConfig(model="tree", backend="toy", draft="none"), chat, Store.in_memory(), EngineProcess(),
                      sampling=lambda _: chat.sampling)  # fmt: skip
        app.waits = []
        async with app.run_test(size=(120, 40)) as pilot:
            while app.job is not None or app.client.model_info is None:
                await pilot.pause(0.05)
            app.waits.clear()
            cpu_s, begun_s = thread_time(), perf_counter()
            await app.ask("hello")
            while app.job is not None:
                await asyncio.sleep(0.05)
            wall_s, cpu_s = perf_counter() - begun_s, thread_time() - cpu_s
            assert app.finished is not None
            speed = app.finished.metrics.tokens_per_second
            cuts = quantiles(app.waits, n=100)
            click.echo(f"{speed:.0f} tok/s, of which drawn {len(app.waits)} tokens in {wall_s:.1f} s")
            click.echo(f"token to screen: median {cuts[49] * 1000:.0f} ms, 99th {cuts[98] * 1000:.0f} ms")
            click.echo(f"CPU of the drawing thread: {cpu_s / wall_s:.0%} of a core")
            return {"tokens_per_second": speed, "latency_ms": [cuts[49] * 1000, cuts[98] * 1000],
                    "cpu": cpu_s / wall_s}  # fmt: skip

    return asyncio.run(body())


if __name__ == "__main__":
    main()
