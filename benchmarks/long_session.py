"""What a long chat costs: share of a core while an answer comes, latency of keys, memory, time to the first screen.

    uv run python -m benchmarks.long_session                                          # after 200 answers of 500 tokens
    uv run python -m benchmarks.long_session --answers 0 --streamed 10000 --rate 100  # the end of one long answer

The chat runs in a process of its own on a pseudo-terminal of 120x40. Its answers are this repository's documents; a
thread that sleeps takes the place of the model, so the figures are those of the screen. Tokens have four characters;
every third one is said to be drafted. The first screen is that of `edgespec chat tree --backend toy`; it is there once
as many bytes have been written as the terminal has cells. stdout ends with one JSON line.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import statistics
import struct
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from subprocess import Popen
from time import monotonic, perf_counter, sleep

import click
import psutil

from benchmarks.harness import EDGESPEC, REPOSITORY, print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.backends.options import LoadOptions
from edgespec.cancel import check_cancelled
from edgespec.chat import Store
from edgespec.chat.state import Chat
from edgespec.client.local import LocalEngine
from edgespec.client.stream import Stream
from edgespec.core.metrics import Meter
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Event, Finished, Request
from edgespec.engine.model_info import ModelInfo
from edgespec.models.load_config import LoadConfig
from edgespec.text.chat_template import PLAIN
from edgespec.text.stream import Piece

COLUMNS, LINES = 120, 40
TOKEN = 4  # characters
KEY = "ж"  # in none of the documents
BACKSPACE = "\x7f"
CHAT = (sys.executable, "-c", "import sys; from benchmarks.long_session import chat; chat(*map(int, sys.argv[1:]))")
TOY = (*EDGESPEC, "chat", "tree", "--backend", "toy")
MAX_WAIT_S = 60.0
WARM_UP_S = 3.0  # of an answer, at most


@click.command()
@click.option("--answers", type=click.IntRange(0), default=200, show_default=True, help="In the conversation.")
@click.option("--tokens", type=click.IntRange(1), default=500, show_default=True, help="Of each answer.")
@click.option("--streamed", type=click.IntRange(0), default=0, help="Tokens of the next one that come at once.")
@click.option("--rate", type=click.IntRange(1), default=30, show_default=True, help="Tokens/s after these.")
@click.option("--seconds", type=click.IntRange(1), default=10, show_default=True, help="Of each measurement.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Of the first screen.")
def main(answers: int, tokens: int, streamed: int, rate: int, seconds: int, repeats: int) -> None:
    """Measure the chat in a long conversation."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment |= {f"EDGESPEC_{name}_DIR": folder for name in ("DATA", "CACHE", "CONFIG")}
        measure_first_screen(environment)  # fills the file cache
        first_screen_s = [measure_first_screen(environment) for _ in range(repeats)]
        terminal = Terminal([*CHAT, *map(str, (answers, tokens, streamed, rate))], environment)
        try:
            result = measure_session(terminal, seconds)
        finally:
            terminal.close()
    result = {"first_screen_s": round(statistics.median(first_screen_s), 3), **result}
    click.echo(", ".join(f"{name} {value}" for name, value in result.items()), err=True)
    print_result("long_session", {**result, "answers": answers, "tokens": tokens, "streamed": streamed, "rate": rate})


def measure_first_screen(environment: Mapping[str, str]) -> float:
    """Seconds from the start of the command to its first screen. Raises click.ClickException."""
    start_s = perf_counter()
    terminal = Terminal(TOY, environment)
    try:
        terminal.wait(lambda: len(terminal.output) >= COLUMNS * LINES)
        return perf_counter() - start_s
    finally:
        terminal.close()


def measure_session(terminal: Terminal, seconds: float) -> dict[str, float]:
    """The figures of `chat` on `terminal` while it answers. Raises click.ClickException."""
    terminal.wait(lambda: b"Ready: tree on toy" in terminal.output)
    terminal.type("go\r")
    process = psutil.Process(terminal.pid)
    sleep(min(WARM_UP_S, seconds))
    before, start_s, written = process.cpu_times(), perf_counter(), len(terminal.output)
    sleep(seconds)
    if len(terminal.output) - written < 100 * seconds:
        raise click.ClickException(f"no answer came: {bytes(terminal.output[-500:])!r}")
    after, wall_s = process.cpu_times(), perf_counter() - start_s
    cpu_s = after.user + after.system - before.user - before.system
    keys_ms = sorted(each * 1000 for each in time_keys(terminal, seconds))
    return {
        "core": round(cpu_s / wall_s, 3),
        "key_median_ms": round(statistics.median(keys_ms), 1),
        "key_p99_ms": round(keys_ms[int(0.99 * len(keys_ms))], 1),
        "rss_mib": round(process.memory_info().rss / 2**20, 1),
    }


def time_keys(terminal: Terminal, seconds: float) -> Iterator[float]:
    """Seconds from each key to its echo, four keys a second."""
    end_s = monotonic() + seconds
    while monotonic() < end_s:
        at, start_s = len(terminal.output), perf_counter()
        terminal.type(KEY)
        terminal.wait(lambda at=at: KEY.encode() in terminal.output[at:])  # type: ignore[misc]
        yield perf_counter() - start_s
        terminal.type(BACKSPACE)
        sleep(0.25)


class Terminal:
    """A child process on a pseudo-terminal."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.output = bytearray()
        self._arrived = threading.Condition()
        self._fd, child_fd = pty.openpty()
        fcntl.ioctl(child_fd, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._child = Popen(
            command, stdin=child_fd, stdout=child_fd, stderr=child_fd, env=environment, start_new_session=True,
            cwd=REPOSITORY,
        )  # fmt: skip
        self.pid = self._child.pid
        os.close(child_fd)
        threading.Thread(target=self._read, daemon=True).start()

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait(self, holds: Callable[[], object]) -> None:
        """Wait until `holds`, which is asked whenever output has arrived. Raises click.ClickException."""
        with self._arrived:
            if not self._arrived.wait_for(holds, MAX_WAIT_S):
                raise click.ClickException(f"the chat did not answer: {bytes(self.output[-500:])!r}")

    def close(self) -> None:
        """End the process."""
        self._child.terminate()
        self._child.wait(timeout=30)

    def _read(self) -> None:
        try:
            while chunk := os.read(self._fd, 65536):
                with self._arrived:
                    self.output += chunk
                    self._arrived.notify_all()
        except OSError:
            return


class Replay(LocalEngine):
    """A chat model whose answers are the documents."""

    def __init__(self, streamed: int, rate: int) -> None:
        super().__init__()
        self._streamed = streamed
        self._rate = rate

    @property
    def model_info(self) -> ModelInfo | None:
        info = super().model_info
        return info and replace(info, chat_template=PLAIN)

    def stream(self, request: Request, speculation: Speculation | None = None) -> Stream[Event]:
        """An answer that only ends when it is cancelled."""

        def work() -> Iterator[Event]:
            start_s, meter = perf_counter(), Meter(1, perf_counter())
            tokens = list_tokens()
            for i in range(10**9):
                check_cancelled()
                at_s = start_s + max(0, i - self._streamed) / self._rate
                sleep(max(0.0, at_s - perf_counter()))
                step = Step(i, (0,), int(i % 3 == 0), int(i % 3 == 0), int(i % 3 == 0), perf_counter(), 0, 0.01)
                meter.add(step)
                yield step
                yield Piece(tokens[i % len(tokens)], "answer", "" if i % 3 else "model")
            yield Finished("length", (), 1, meter.metrics())

        return self.submit(work)


def chat(answers: int, tokens: int, streamed: int, rate: int) -> None:
    """Run the chat on a conversation of `answers` answers, as a process of its own."""
    from edgespec.chat.tui.app import ChatApp

    store = Store.in_memory()
    conversation, turn = store.new("tree"), None
    texts = list_tokens()
    for i in range(answers):
        answer = [texts[(i * tokens + k) % len(texts)] for k in range(tokens)]
        spans = [(len(token), "" if k % 3 else "model", 1) for k, token in enumerate(answer)]
        turn = store.add(conversation, turn, "user", f"Question {i}?")
        turn = store.finish(store.add(conversation, turn, "assistant", ""), "".join(answer), "", spans)
    state = Chat(None, SamplingParams(), 1, None, ())
    resume = conversation.id if answers else None
    config = LoadConfig(model="tree", backend="toy", load=LoadOptions(context_size=2**20))
    ChatApp(config, state, store, Replay(streamed, rate), resume=resume).run()


def list_tokens() -> list[str]:
    """The documents in pieces of TOKEN characters."""
    text = "\n\n".join(file.read_text() for file in sorted((REPOSITORY / "docs").glob("*.md")))
    return re.findall(f"(?s).{{1,{TOKEN}}}", text.replace(KEY, ""))


if __name__ == "__main__":
    main()
