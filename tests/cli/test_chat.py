"""`edgespec chat`: the plain loop, through a pipe and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import COMMAND, Cli
from tests.command import heed_interrupts

OPTIONS = ("--max-tokens", "10", "--temperature", "0", "--threads", "1")


def test_slash_commands(cli: Cli, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    lines = ["/help", "import os", "/stats", f"/export {chat}", "/undo", "/undo", "import os", "/retry", "/spec off",
             "/retry", "/stats", "/spec on", "/spec 5", "/draft ngram", "/spec", "/set temperature 0.5", "/set top-k 7",
             "/set", "/new", "/exit", "never read"]  # fmt: skip
    out = cli("chat", *OPTIONS, stdin="\n".join(lines)).stdout
    for told in (
        "/retry",
        "tau",
        f"wrote {chat}",
        "removed: import os",
        "speculation: off",
        "speculation: 5 tokens at a time",
        "draft: ngram\nspeculation: 5 tokens at a time, by ngram\n",
    ):
        assert told in out, told
    assert re.search(r"temperature +0\.5\n", out)
    assert re.search(r"top_k +7\n", out)
    assert re.search(r"tau +1\n", out)  # the answer after /spec off
    written = json.loads(chat.read_text())
    assert written["model"] == "python-6m" and [turn["role"] for turn in written["turns"]] == ["user", "assistant"]
    assert out.count(written["turns"][1]["text"]) >= 4  # both greedy answers and their retries are the same


def test_mistakes_are_told_and_the_chat_goes_on(cli: Cli, tmp_path: Path) -> None:
    lines = ["/nonsense", "/set temperature warm", "/set colour 1", "/set max_tokens 0", "/export", "/export x.md",
             "/stats", "/spec maybe", "/draft none.gguf", "/retry", "import os", "/export /no/such/folder/x.md",
             "/export x.txt"]  # fmt: skip
    done = cli("chat", *OPTIONS, stdin="\n".join(lines))
    assert done.returncode == 0
    for told in (
        "/nonsense",
        "must be a number",
        "no setting",
        "max_tokens must",
        "/export needs FILE",
        "no conversation to export",
        "no answer yet",
        "no known format",
        "cannot write",
        "/spec takes",
        "none.gguf",
        "no question",
    ):
        assert told in done.stderr, told
    assert done.stdout.strip()


TOY = ("chat", "linear", "--plain", "--backend", "toy", "--draft", "none", "--temperature", "0", "--logit-bias",
       "256=-1000")  # fmt: skip


def test_a_cut_answer_is_gone_on_with(cli: Cli, tmp_path: Path) -> None:
    def saved(name: str) -> list[str]:
        return [turn["text"] for turn in json.loads((tmp_path / name).read_text())["turns"]]

    lines = ["/continue", '"""two', 'lines"""', "/export a.json", "/set max_tokens 30", "/continue",
             "/export b.json", "/export a.json", "/set max_tokens 45", "/retry", "/export! a.json", "/undo",
             "/continue"]  # fmt: skip
    done = cli(*TOY, "--max-tokens", "15", stdin="\n".join(lines))
    question, whole, again = saved("a.json")
    assert question == "two\nlines" and len(whole) == 45 and whole == again, "15 and 30 tokens are the text of 45"
    assert saved("b.json") == [question, whole]
    assert done.stderr.count("there is no answer to continue.") == 2
    assert "'a.json' exists.\nAdd ! to the command" in done.stderr


def test_a_full_context_is_told_of_before_and_can_roll(cli: Cli) -> None:
    small = (*TOY, "--ctx", "100", "--max-tokens", "30", "--no-memory")
    done = cli(*small, stdin="\n".join(["a" * 20, "b" * 20, "c" * 20, "/set rolling on", "d" * 20, "e" * 20, "/set"]))
    notes = [line for line in done.stderr.splitlines() if line]
    assert notes[0].startswith("note: The context is 100% full (100 of 100 tokens). /set rolling on"), notes
    assert notes[1].startswith("the prompt has 120 tokens, the context holds 100.") and "/new" in notes[2], notes
    assert notes[3] == "note: The context is full: question 1 and its answer are left out from here on."
    assert notes[4] == notes[3].replace("question 1", "question 2") and len(notes) == 5
    assert "max_tokens 30\n" in done.stdout and "rolling on\n" in done.stdout


class Terminal:
    """A child on a pseudo-terminal."""

    def __init__(self, arguments: list[str], environment: dict[str, str], term: str = "dumb") -> None:
        ours, theirs = pty.openpty()
        self._fd = ours
        self.child = subprocess.Popen(
            [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": term},
            start_new_session=True, preexec_fn=heed_interrupts,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str, count: int = 1, timeout_s: float = 60) -> None:
        """Read until `text` has appeared `count` times since the start."""
        deadline = time.monotonic() + timeout_s
        while self.seen.count(text) < count:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._fd], [], [], 0.2)[0]:
                self.seen += self._read()

    def interrupt_at_prompt(self, told: str) -> None:
        """Ctrl-C until `told` appears. Python notices one only if it ends readline's wait for a key: not in the instant
        before that wait, nor together with a key.
        """
        for _ in range(20):
            time.sleep(0.3)  # until it waits
            self.child.send_signal(signal.SIGINT)
            with suppress(AssertionError):
                return self.until(told, timeout_s=2)
            self.type(" ")
        raise AssertionError(self.seen)

    def _read(self) -> str:
        try:
            return os.read(self._fd, 65536).decode("utf-8", "replace")
        except OSError:  # how Linux says that the other end is closed
            raise AssertionError(f"the child has gone: {self.seen[-2000:]}") from None

    def close(self) -> int:
        code = self.child.wait(timeout=60)
        os.close(self._fd)
        return code


def test_an_answer_that_repeats_itself_goes_on_when_it_is_told_to(cli: Cli) -> None:
    only = ("--backend", "toy", "--temperature", "0", "--logit-bias", "97=1000", "--no-memory")
    done = cli("chat", "linear", *only, stdin="hello\n/continue\n/stats\n")
    assert done.stderr.count("; the answer repeats itself; /continue goes on") == 2
    assert done.stdout.count("a" * 256) == 2, "each part as long as one"


def test_run_with_a_model_alone_chats(environment: dict[str, str]) -> None:
    """Line by line also where `chat` would be full-screen: `run` is a child whose stderr is a file."""
    options = ["--threads", "1", "--temperature", "0", "--max-tokens", "4", "--draft", "none"]
    terminal = Terminal(["run", "python-6m", *options], environment, "xterm")
    terminal.until(">>> ")
    terminal.type("def f(x):\n")
    terminal.until("4 tokens, ")
    terminal.until(">>> ", 2)
    terminal.type("\x04")
    assert terminal.close() == 0


def test_the_next_message_opens_a_model_whose_engine_has_died(environment: dict[str, str]) -> None:
    command = [*COMMAND, "chat", "--plain", "python-6m", "--threads", "1", "--draft", "none"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as chat:
        assert chat.stdin is not None and chat.stdout is not None and chat.stderr is not None
        chat.stdin.write("def f(x):\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)
        (engine,) = psutil.Process(chat.pid).children()
        engine.send_signal(signal.SIGSEGV)
        while "SIGSEGV" not in (line := chat.stderr.readline()):
            assert line
        assert "A new message opens the model again." in chat.stderr.readline()
        chat.stdin.write("/set max_tokens 5\n/retry\n/stats\n")
        out, _ = chat.communicate(timeout=60)
    assert re.search(r"emitted_tokens +5\n", out) and chat.returncode == 0


def test_on_a_terminal_interrupt_stops_the_answer_only(environment: dict[str, str]) -> None:
    arguments = ["chat", "--plain", "linear", "--backend", "toy", "--draft", "none", "--max-tokens", "4000",
                 "--logit-bias", "256=-1000", "--temperature", "5", "--no-memory"]  # fmt: skip
    terminal = Terminal(arguments, environment)
    terminal.until(">>> ")
    terminal.type("hello\n")
    terminal.until("e", 30)  # some of its 4,000 letters
    terminal.child.send_signal(signal.SIGINT)
    terminal.until("; stopped")
    terminal.until(">>> ", 2)
    terminal.type("/set max_tokens 3\n")
    terminal.until(">>> ", 3)
    terminal.type("again\n")
    terminal.until("3 tokens, ")
    terminal.until(">>> ", 4)
    terminal.interrupt_at_prompt("once more")
    terminal.type("/exit\n")
    assert terminal.close() == 0
    assert "Traceback" not in terminal.seen


def test_commands_of_the_full_screen_work_line_by_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("xyzzy\n")
    lines = [
        "/system Be brief.",
        "/attach notes.txt",
        "//what is this?",
        "/rename Word",
        "/export a.json",
        "/new",
        "/import a.json",
        "/edit",
        "/model linear",
        "/model",
        "hello",
        "/preset save short",
        "/export b.json",
    ]
    done = cli("chat", "--plain", "tree", "--backend", "toy", "--draft", "none", *OPTIONS, stdin="\n".join(lines))
    assert done.returncode == 0 and done.stderr.count("\n") == 1, "where texts are kept"
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["system"] == "Be brief." and written["title"] == "Word"
    question = "notes.txt:\n```txt\nxyzzy\n```\n/what is this?"
    assert written["turns"][0]["text"] == question
    for told in ("notes.txt goes with the next message", "Word (2 messages)\n>>> notes.txt:", "linear is open",
                 f"removed, to be sent again as you change it:\n{question}", "saved the preset short"):  # fmt: skip
        assert told in done.stdout, told
    later = json.loads((tmp_path / "b.json").read_text())
    assert later["model"] == "linear" and [turn["text"] for turn in later["turns"] if turn["role"] == "user"] == [
        question,
        "hello",
    ]
    begun = cli("chat", "--plain", "tree", "--backend", "toy", "--preset", "short", "--seed", "3", stdin="/set\n")
    assert "system Be brief.\n" in begun.stdout and "max_tokens 10\n" in begun.stdout and "seed 3\n" in begun.stdout
    refused = cli("chat", "--plain", "--preset", "long")
    assert (
        refused.returncode == 2
        and "There is no preset 'long'" in refused.stderr
        and "There are short." in refused.stderr
    )


def test_a_chat_on_a_terminal_is_saved_and_continued(environment: dict[str, str], cli: Cli) -> None:
    options = ["--draft", "none", "--max-tokens", "4", "--temperature", "0"]
    terminal = Terminal(["chat", "--plain", "-m", "python-6m", *options], environment)
    terminal.until(">>> ")
    terminal.type("def first(x):\n")
    terminal.until(">>> ", 2)
    terminal.type("/edit\n")
    terminal.until("def first(x):", 2)
    terminal.type(" # more\n")
    terminal.until(">>> ", 4)
    terminal.type("\x04")
    assert terminal.close() == 0
    done = cli("chat", "--plain", "--continue", *options, stdin="/export all.json\nx = 1\n")
    assert "(2 messages)\n>>> def first(x): # more\n" in done.stdout
    assert "python-6m" in cli("history").stdout
    resumed = cli("chat", "--plain", "--resume", "1", *options, stdin="/exit")
    assert ">>> x = 1\n" in resumed.stdout


def test_the_model_that_was_opened_last_opens_again(cli: Cli) -> None:
    options = ("--draft", "none", "--max-tokens", "2", "--temperature", "0")
    cli("chat", "--plain", *options, stdin="x = 1\n", EDGESPEC_MODEL="python-6m")
    shown = cli("chat", "--plain", *options, stdin="?\n/model\n", EDGESPEC_MODEL="python-6m").stdout
    assert "python-6m is open" in shown and "/attach FILE" in shown


@pytest.mark.parametrize(("options", "told"), [((), True), (("--draft-max", "0"), False), (("--draft", "none"), False)])
def test_plain_decoding_that_was_asked_for_is_no_news(cli: Cli, options: tuple[str, ...], told: bool) -> None:
    done = cli("run", "x = 1", "-m", "linear", "--backend", "toy", "--max-tokens", "1", "--temperature", "0", *options)
    assert ("drafts would not pay" in done.stderr) == told, done.stderr
