"""`edgespec history`, and what the shell offers of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.chat import Store
from tests.cli.conftest import Cli


@pytest.fixture
def saved(environment: dict[str, str]) -> list[int]:
    """The ids of three conversations, the last one changed last."""
    store = Store.open(Path(environment["EDGESPEC_DATA_DIR"]) / "conversations.db")
    ids = []
    for text in ("Sort a list", "Binary SEARCH in a list", "A poem"):
        conversation = store.new("toy")
        question = store.add(conversation, None, "user", text)
        store.finish(store.add(conversation, question, "assistant", ""), "Straße")
        ids.append(conversation.id)
    store.close()
    return ids


def test_conversations_are_listed_and_searched(cli: Cli, saved: list[int]) -> None:
    first, second, third = saved
    lines = cli("history").stdout.splitlines()
    assert [line.split()[0] for line in lines if line] == ["ID", str(third), str(second), str(first)]
    assert "A poem" in lines[1] and "toy" in lines[1]
    assert [each["id"] for each in json.loads(cli("history", "list", "--json").stdout)] == [second, first]
    assert [each["id"] for each in json.loads(cli("history", "STRASSE", "--limit", "2", "--json").stdout)] == [
        third,
        second,
    ]
    shown = cli("history", "search", "binary")
    assert f"{second} " in shown.stdout and "Binary SEARCH in a list" in shown.stdout
    assert "--resume ID" in shown.stderr
    assert "No conversation has all words of 'nothing'." in cli("history", "nothing").stdout


def test_nothing_is_saved_yet(cli: Cli) -> None:
    done = cli("history")
    assert done.returncode == 0 and "No conversation is saved yet." in done.stdout
    assert json.loads(cli("history", "--json").stdout) == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("chat llama-", {"llama-70b-q4", "llama-8b-q4", "llama-3.2-1b-q4", "llama-3.2-3b-q4"}),
        ("run -m python", {"python-6m"}),
        ("run --to", {"--top-k", "--top-p"}),
        ("serve mine=llama-8", {"mine=llama-8b-q4"}),
        ("chat --draft lay", {"layerskip"}),
        ("bench --category sum", {"summary"}),
        ("hist", {"history"}),
        ("adapt li", {"list"}),
        ("adapt llama-8", {"llama-8b-q4"}),
        ("adapt --minu", {"--minutes"}),
    ],
)
def test_arguments_are_completed(cli: Cli, typed: str, offered: set[str]) -> None:
    words = f"edgespec {typed}"
    done = cli(_EDGESPEC_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert {line.removeprefix("plain,") for line in done.stdout.splitlines()} == offered


def test_bash_completes(environment: dict[str, str], tmp_path: Path) -> None:
    """The function of a real bash that Tab calls; where it offers nothing, bash offers files."""
    (tmp_path / "model.gguf").touch()
    script = (
        'eval "$(edgespec completion bash)"\n'
        "COMP_WORDS=(edgespec pull ./mod)\nCOMP_CWORD=2\n"
        '_edgespec_completion "edgespec"\n'
        "[ ${#COMPREPLY[@]} = 0 ] && COMPREPLY=($(compgen -f -- ./mod))\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**environment, "PATH": path}, cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["./model.gguf"], done.stderr


def test_ids_of_conversations_are_completed(cli: Cli, saved: list[int]) -> None:
    done = cli(_EDGESPEC_COMPLETE="zsh_complete", COMP_WORDS="edgespec chat --resume ", COMP_CWORD="3")
    assert done.stdout.split("\n")[1:3] == [str(saved[-1]), "A poem"]
