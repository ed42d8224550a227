"""The full-screen chat on a pseudo-terminal: bytes that are no text, and internal errors."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path
from struct import pack
from time import monotonic

import pytest

CHAT = """import sys
from edgespec.cli.main import main
from edgespec.chat.tui.app import ChatApp
from edgespec.chat.tui.terminal import Terminal
def fail(*_):
    raise KeyError("a fault")
{fault}
main(["chat", "tree", "--backend", "toy", "--draft", "ngram", "--no-memory"])
"""


class Child:
    """A chat on a terminal of its own."""

    def __init__(self, fault: str = "", early: bytes = b"") -> None:
        """`early` is typed before the chat is there."""
        self._fd, theirs = pty.openpty()
        self.type(early)
        ioctl(theirs, termios.TIOCSWINSZ, pack("4H", 24, 100, 0, 0))
        self.before = termios.tcgetattr(theirs)
        command = [sys.executable, "-c", CHAT.format(fault=fault)]
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                                         env={**os.environ, "TERM": "xterm-256color"})  # fmt: skip
        self._theirs = theirs
        self.seen = b""

    def type(self, data: bytes) -> None:
        os.write(self._fd, data)

    def until(self, text: bytes) -> None:
        end = monotonic() + 60
        while text not in self.seen:
            assert monotonic() < end, self.seen[-3000:]
            self._read()

    def _read(self) -> None:
        if select.select([self._fd], [], [], 0.1)[0]:
            self.seen += os.read(self._fd, 65536)

    def end(self) -> int:
        end = monotonic() + 60
        while (code := self._process.poll()) is None:
            assert monotonic() < end, self.seen[-3000:]
            self._read()
        self._read()
        return code

    @property
    def is_restored(self) -> bool:
        return termios.tcgetattr(self._theirs) == self.before and b"\x1b[?1049l" in self.seen

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)
        os.close(self._theirs)


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(fault: str = "", early: bytes = b"") -> Child:
        children.append(Child(fault, early))
        children[-1].until(b"tree on toy")
        return children[-1]

    yield start
    for each in children:
        each.close()


def test_a_byte_that_is_no_utf_8_is_replaced(start: Callable[..., Child], data: Path) -> None:
    child = start()
    child.type(b"caf\xe9 au lait, cr\xc3")  # Latin-1, and half of a character that the next read completes
    child.until("caf\ufffd au lait, cr".encode())
    child.type(b"\xa8me\r")
    child.until(b" tok/s")
    child.type(b"\x11")
    assert child.end() == 0 and child.is_restored
    assert json.loads((data / "prompts.jsonl").read_text()) == "caf\ufffd au lait, crème"


def test_what_is_typed_before_the_screen_is_there_is_sent(start: Callable[..., Child], data: Path) -> None:
    child = start(early=b"early\r")
    child.until(b" tok/s")
    child.seen = b""
    child.type(b"a\nb\r")  # Ctrl+J
    child.until(b" tok/s")
    child.type(b"\x11")
    assert child.end() == 0
    assert [json.loads(line) for line in (data / "prompts.jsonl").read_text().splitlines()] == ["early", "a\nb"]


# Faults for the keys F1, F2 and F5: in an action, on a screen, in the thread of Textual that reads keys.
FAULTS = {
    b"\x1bOP": "ChatApp.action_help = fail",
    b"\x1bOQ": "ChatApp._read_draft_stats = fail",
    b"\x1b[15~": "Terminal.process_message = lambda self, event, go_on=Terminal.process_message: "
    "fail() if getattr(event, 'key', '') == 'f5' else go_on(self, event)",
}


@pytest.mark.parametrize("key", FAULTS)
def test_an_internal_error_is_told_in_a_sentence(start: Callable[..., Child], data: Path, key: bytes) -> None:
    child = start(FAULTS[key])
    child.type(b"not sent yet")
    child.until(b"yet")
    child.type(key)
    assert child.end() == 70 and child.is_restored
    told = child.seen.rpartition(b"\x1b[?1049l")[2].decode()
    assert "error: Internal error: KeyError: 'a fault'." in told and "Traceback" not in told
    log = re.search(r"Please report it, with (\S+\.log)\.", told)
    assert log is not None and "in fail" in Path(log[1]).read_text()
    Path(log[1]).unlink()
    assert json.loads((data / "prompts.jsonl").read_text()) == "not sent yet"  # Up brings it back
