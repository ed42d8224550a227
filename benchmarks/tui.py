"""What the full-screen chat costs: `edgespec chat` against `edgespec run`, or latency and CPU time of the screen.

    uv run python -m benchmarks.tui                        # the embedded pair
    uv run python -m benchmarks.tui --model 1b.gguf --tokens 64 --draft none
    uv run python -m benchmarks.tui --latency              # the toy backend at full speed

Without `--latency` the real commands run on pseudo-terminals of 120x40, a run and an answer of the chat in turn; the
chat's tokens/s come from its stored conversation. With it the app runs in this process without a terminal. Latency is
the time from a token's emission to the end of the refresh that shows it. stdout ends with one JSON line.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import struct
import subprocess
import tempfile
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, perf_counter, sleep, thread_time

import click

from benchmarks.harness import EDGESPEC, MODEL_PATH, print_result
from edgespec.chat import Store
from edgespec.chat.state import Chat
from edgespec.chat.tui.app import ChatApp
from edgespec.client.process import EngineProcess
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Event
from edgespec.models.load_config import LoadConfig

PROMPT = "def read_lines(path):"
LOAD_S = 8.0  # until the chat has loaded the model; it refuses prompts before that
PAUSE_S = 0.5  # after /new
MAX_WAIT_S = 600.0  # for one answer
NEVER = ((256, -1000.0),)  # logit bias of the toy backend's end of generation


@click.command()
@click.option("--model", type=MODEL_PATH, help="[default: the embedded pair]")
@click.option("--draft", default="none", show_default=True)
@click.option("--tokens", type=click.IntRange(2), help="[default: 200; with --latency 4000]")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--latency", is_flag=True, help="Measure latency and CPU time on the toy backend.")
def main(model: Path | None, draft: str, tokens: int | None, repeats: int, latency: bool) -> None:
    """Measure the chat."""
    result = asyncio.run(measure_latency(tokens or 4000)) if latency else compare(model, draft, tokens or 200, repeats)
    print_result("tui", result, *([model] if model else []))


def compare(model: Path | None, draft: str, tokens: int, repeats: int) -> dict[str, object]:
    """Tokens/s after the first token of both commands, interleaved."""
    options = ["--temperature", "0", "--max-tokens", str(tokens), "--threads", "1", "--ctx", "1024", "--draft", draft]
    ratios, pairs = [], []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "EDGESPEC_DATA_DIR": folder, "TERM": "xterm-256color"}
        terminal = Terminal([*EDGESPEC, "chat", *([str(model)] if model else []), *options], environment)
        try:
            sleep(LOAD_S)
            for i in range(repeats + 1):
                run_speed = measure_run(model, options, environment)
                terminal.type(f"{PROMPT}\r")
                chat_speed = read_stored_speed(Path(folder) / "conversations.db", i + 1)
                terminal.type("/new\r")
                sleep(PAUSE_S)
                if i:  # the first is a warm-up
                    pairs.append((round(run_speed, 2), round(chat_speed, 2)))
                    ratios.append(chat_speed / run_speed)
                    click.echo(f"run {run_speed:7.2f}  chat {chat_speed:7.2f} tok/s  {ratios[-1]:.3f}", err=True)
        finally:
            terminal.close()
    click.echo(f"chat / run: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", err=True)
    return {"chat_over_run": median(ratios), "pairs": pairs, "tokens": tokens, "draft": draft}


def measure_run(model: Path | None, options: Sequence[str], environment: Mapping[str, str]) -> float:
    """Tokens/s of `edgespec run`. Raises CalledProcessError."""
    command = [*EDGESPEC, "run", PROMPT, *(["--model", str(model)] if model else []), *options, "--json"]
    child = subprocess.run(command, env=environment, capture_output=True, check=True)
    return float(json.loads(child.stdout.splitlines()[-1])["metrics"]["tokens_per_second"])


def read_stored_speed(database: Path, count: int) -> float:
    """Tokens/s stored with the last answer, once `count` answers are finished. Raises click.ClickException."""
    deadline = monotonic() + MAX_WAIT_S
    while monotonic() < deadline:
        sleep(0.2)
        if not database.exists():
            continue
        store = Store.open(database)
        try:
            turns = [turn for conversation in store.recent() for turn in store.turns(conversation)]
        finally:
            store.close()
        finished = sorted((t for t in turns if t.role == "assistant" and t.finished), key=lambda turn: turn.id)
        if len(finished) >= count:
            return float(finished[-1].metrics["tokens_per_second"])
    raise click.ClickException(f"the chat did not answer within {MAX_WAIT_S:.0f} s.")


class Terminal:
    """A child process on a pseudo-terminal of 120x40; its output is read and discarded."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._fd, child_fd = pty.openpty()
        fcntl.ioctl(child_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self._child = subprocess.Popen(
            command, stdin=child_fd, stdout=child_fd, stderr=child_fd, env=environment, start_new_session=True
        )
        os.close(child_fd)
        threading.Thread(target=self._drain, daemon=True).start()

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> None:
        """Quit with Ctrl+Q."""
        self.type("\x11")
        self._child.wait(timeout=30)

    def _drain(self) -> None:
        try:
            while os.read(self._fd, 65536):
                pass
        except OSError:
            return


class TimedApp(ChatApp):
    """Records the seconds between each token's emission and the refresh that shows it."""

    latencies: list[float]

    async def show_events(self, events: Sequence[Event]) -> None:
        emitted = [event.at_s for event in events if isinstance(event, Step)]
        self.call_after_refresh(lambda: self.latencies.extend(perf_counter() - at_s for at_s in emitted))
        await super().show_events(events)


async def measure_latency(tokens: int) -> dict[str, object]:
    """Generate one answer on the toy backend; `cpu` is the share of a core that the drawing thread takes."""
    chat = Chat(None, SamplingParams(temperature=0, logit_bias=NEVER), tokens, None, ())
    config = LoadConfig(model="tree", backend="toy", draft="none")
    app = TimedApp(config, chat, Store.in_memory(), EngineProcess(), sampling=lambda _: chat.sampling)
    app.latencies = []
    async with app.run_test(size=(120, 40)) as pilot:
        while app.activity.job is not None or app.client.model_info is None:
            await pilot.pause(0.05)
        app.latencies.clear()
        start_cpu_s, start_s = thread_time(), perf_counter()
        await app.ask("hello")
        while app.activity.job is not None:
            await asyncio.sleep(0.05)
        wall_s, cpu_s = perf_counter() - start_s, thread_time() - start_cpu_s
        assert app.activity.finished is not None
        speed = app.activity.finished.metrics.tokens_per_second
    cuts_ms = [seconds * 1000 for seconds in quantiles(app.latencies, n=100)]
    click.echo(f"{speed:.0f} tok/s; drawn {len(app.latencies)} tokens in {wall_s:.1f} s", err=True)
    click.echo(f"latency: median {cuts_ms[49]:.0f} ms, 99th percentile {cuts_ms[98]:.0f} ms", err=True)
    return {"tokens_per_second": speed, "latency_ms": [cuts_ms[49], cuts_ms[98]], "cpu": cpu_s / wall_s}


if __name__ == "__main__":
    main()
