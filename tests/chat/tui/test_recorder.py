"""Conversations in the store: kept as they go on, gone on with later, and what happens when they cannot be kept."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import sqlite3
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edgespec.backends.options import LoadOptions
from edgespec.chat import Store
from edgespec.chat.recorder import open_store
from edgespec.client.process import EngineProcess
from edgespec.core.sampling import SamplingParams
from edgespec.models.load_config import LoadConfig
from tests.chat.tui.driving import EMBEDDED, ENDLESS, Driver, chat_of, driving, in_app, in_loop
from tests.cli.conftest import COMMAND


def locked(data: Path) -> sqlite3.Connection:
    """Another process that is writing."""
    other = sqlite3.connect(data / "conversations.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


def test_what_was_said_is_kept_and_gone_on_with() -> None:
    async def first() -> tuple[list[str], object]:
        async with driving(EMBEDDED, chat=chat_of(12, "# Code")) as chat:
            await chat.ask("import os\n")
            await chat.ask("import sys\n")
            metrics = chat.turns[-1].metrics
            assert metrics["emitted_tokens"] >= 1 and metrics["tokens_per_second"] > 0 and metrics["reason"]
            assert metrics["drafted_tokens"] > 0 and metrics["seed"] == 1
            return chat.texts, chat.app.chat.request()

    async def second() -> None:
        async with driving(EMBEDDED, chat=chat_of(12), resume=1) as chat:
            assert chat.texts == chat.shown == texts and chat.app.chat.request() == asked
            assert all("tokens" in footer for footer in chat.footers) and len(chat.footers) == 2
            await chat.ask("more")
            assert chat.shown[:4] == texts and len(chat.app.recorder.store.recent()) == 1

    texts, asked = asyncio.run(first())
    store = Store.open()
    (kept,) = store.recent()
    path = store.path(kept.leaf)
    assert [turn.text for turn in path] == texts and all(turn.finished for turn in path)
    assert kept.system == "# Code" and kept.model and path[-1].metrics["emitted_tokens"] >= 1
    assert sum(span[0] for span in path[1].spans) == len(path[1].text)
    store.close()
    asyncio.run(second())


def test_a_question_that_cannot_be_answered() -> None:
    small = LoadConfig(model="tree", backend="toy", draft_max=3, load=LoadOptions(context_size=32))

    async def main() -> None:
        async with driving(small, chat=chat_of(4)) as chat:
            await chat.hears("x" * 50, "the context holds 32", "Shorten", kind="error")
            assert chat.texts == chat.shown == [] and not chat.app.chat.messages
            assert chat.prompt.text == "x" * 50 and not chat.app.recorder.store.recent()
            chat.app.chat.sampling = SamplingParams(temperature=0.0, logit_bias=((256, 1000.0),))
            await chat.send("one")  # its answer ends at once
            await chat.until(lambda: chat.texts == ["one"] and chat.app.activity.job is None)
        async with driving(small, chat=chat_of(4), resume=1) as chat:
            assert chat.texts == chat.shown == ["one"]
            await chat.send("two")
            await chat.until(lambda: len(chat.turns) == 2)
            await chat.idle()
            assert chat.shown == chat.texts and chat.texts[0] == "two" and len(chat.texts) == 2
            assert [message.content for message in chat.app.chat.messages] == chat.texts
            await chat.hears("/branch", "branch 1 of 2")
            assert chat.texts == ["one"]

    asyncio.run(main())


@in_app
async def test_a_store_that_fails_during_an_answer_is_told_of_once(chat: Driver, data: Path) -> None:
    await chat.ask("before")
    await chat.hears("/new", "new")
    await chat.ask("kept")
    answer = await chat.begin("hello")
    other = locked(data)
    await chat.until(lambda: chat.notices("error"))
    await chat.growing(len(answer.text) + 50)
    await chat.press("escape")
    await chat.idle()
    assert len(chat.turns) == 4 and chat.texts[-1] == answer.text
    other.close()
    (message,) = chat.notices("error")
    assert "is locked by another process. The chat continues without saving." in message
    chat.app.chat.max_tokens = 5
    await chat.ask("and on")
    await chat.send("/retry 1")
    await chat.until(lambda: len(chat.turns) == 2 and chat.turns[-1].finished and chat.app.activity.job is None)
    await chat.hears("/branch", "branch 1 of 2")
    assert len(chat.turns) == 6 and not chat.notices("error")
    store = Store.open()
    kept, before = store.recent()
    assert [turn.text for turn in store.path(kept.leaf)][:3:2] == ["kept", "hello"] and before.title == "before"
    assert not store.path(kept.leaf)[-1].finished


def test_a_folder_that_cannot_be_written(data: Path) -> None:
    data.write_text("a file")

    async def main() -> None:
        async with driving(store=open_store()) as chat:
            (message,) = chat.notices("error")
            assert "This chat is not saved." in message
            await chat.ask("hello")
            await chat.press("ctrl+t")
            assert chat.notices("error") == [message]  # settings and prompts say nothing more

    asyncio.run(main())


class Screen:
    """The program on a terminal of its own, until it is killed."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.child = subprocess.Popen([*COMMAND, "chat", *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
                                      env={**os.environ, "TERM": "xterm-256color"}, start_new_session=True)  # fmt: skip
        os.close(theirs)
        self._seen = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while chunk := os.read(self.ours, 65536):
                self._seen.extend(chunk)

    def until(self, holds: Callable[[bytes], object]) -> None:
        end = time.monotonic() + 30
        while not holds(bytes(self._seen)):
            assert time.monotonic() < end and self.child.poll() is None, bytes(self._seen[-2000:])
            time.sleep(0.02)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.wait()
        self._reader.join(5)
        os.close(self.ours)


def test_a_program_that_is_killed_leaves_the_answer_so_far_and_the_name_of_its_model(data: Path) -> None:
    store = Store.open()
    toy = ("tree", "--backend", "toy", "--draft", "ngram", "--draft-max", "3", "--ctx", str(ENDLESS))
    with Screen(*toy, "--temperature", "1", "--logit-bias", "256=-1000", "--max-tokens", str(ENDLESS - 100)) as screen:
        screen.until(lambda seen: b"Ready: tree on toy" in seen)
        os.write(screen.ours, b"hello\r")
        screen.until(lambda _: any(turn.role == "assistant" and turn.text for turn in store.path(2)))
    question, answer = store.path(store.recent(1)[0].leaf)
    assert question.text == "hello" and answer.text and not answer.finished

    async def resume() -> None:
        async with driving(resume=1) as chat:
            assert chat.texts == chat.shown == ["hello", answer.text]
            assert chat.footers == ["cut off when the program ended"]
            await chat.ask("and on")

    asyncio.run(resume())
    store.reopen(store.path(4)[-1])
    with Screen("--continue") as screen:  # opens what was open
        screen.until(lambda seen: b"Ready: tree on toy" in seen)
    assert store.resume(1).model == "tree"


@in_loop
async def test_the_end_of_the_engine_leaves_the_answer_so_far_and_another_model_opens() -> None:
    client = EngineProcess()
    async with driving(client=client) as chat:
        await chat.begin("hello")
        client._process.kill()
        await chat.idle()
        assert any("SIGKILL" in each and "/model" in each for each in chat.notices("error"))
        question, answer = chat.turns
        assert question.text == "hello" and answer.text and chat.shown == chat.texts
        await chat.hears("and on", "No model is open", kind="error")
        assert chat.prompt.text == "and on"
        chat.prompt.clear()
        await chat.press("f5")
        await chat.until(lambda: chat.app.client.model_info is not None)
        await chat.idle()
        chat.app.chat.max_tokens = 5
        assert await chat.ask("and on")
        assert not any("SIGKILL" in each for each in chat.notices("error"))  # it went with the new process
        client._process.kill()  # while nothing runs: it is told at once, and once
        await chat.until(lambda: len([each for each in chat.notices("error") if "SIGKILL" in each]) == 1)
        await chat.pilot.pause(0.5)
        assert len([each for each in chat.notices("error") if "SIGKILL" in each]) == 1
        await chat.press("f5")
        await chat.until(lambda: chat.app.client.model_info is not None)
        await chat.idle()
        assert await chat.ask("still there")
