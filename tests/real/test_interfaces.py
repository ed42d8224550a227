"""A greeting is answered as by a chat model, whatever program asks."""

from __future__ import annotations

import json
from pathlib import Path

import edgespec
from tests.cli.conftest import Cli, cli, environment
from tests.real.texts import ANSWER, MODEL
from tests.server.serving import serving

__all__ = ["cli", "environment"]

OPTIONS = ("--temperature", "0", "--threads", "1", "--ctx", "512")


def test_python(plain: edgespec.Model) -> None:
    assert plain.chat("hello", temperature=0).text == ANSWER


def test_run_opens_the_installed_package(cli: Cli) -> None:
    """Without a name, since it is the only chat model that is installed."""
    done = cli("run", "hello", "--backend", "llamacpp", "--json", "--draft", "ngram", *OPTIONS, EDGESPEC_MODEL="")
    result = json.loads(done.stdout)
    assert (result["text"], result["model"], result["finish_reason"]) == (ANSWER, MODEL, "stop")


def test_chat_line_by_line(cli: Cli) -> None:
    lines = "hello\n/retry\n/exit\n"
    done = cli("chat", "--plain", MODEL, "--backend", "llamacpp", "--draft", "ngram", *OPTIONS, stdin=lines)
    assert done.returncode == 0 and done.stdout.count(ANSWER) == 2


def test_a_server_for_both_clients(tmp_path: Path) -> None:
    with serving(tmp_path, MODEL, "--backend", "llamacpp", "--no-memory", "--draft", "ngram", *OPTIONS[2:]) as server:
        messages = [{"role": "user", "content": "hello"}]
        chat = server.openai().chat.completions.create(model=MODEL, messages=messages, temperature=0)  # type: ignore[arg-type]
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (ANSWER, "stop")
        client = server.anthropic()
        with client.messages.stream(model=MODEL, max_tokens=32, messages=messages, temperature=0) as stream:  # type: ignore[arg-type]
            assert "".join(stream.text_stream) == ANSWER
