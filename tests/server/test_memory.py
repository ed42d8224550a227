"""The memory behind a server: whose texts are kept, and that no key's answers are drafted from another's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edgespec.server.auth import add_key
from tests.memory.texts import find_bytes
from tests.server.interfaces import PATHS, make_body
from tests.server.serving import COMMAND, KEY, Server, serving

TOY = ("tree", "--backend", "toy", "--ctx", "1000")
SUFFIX = (*TOY, "--draft", "suffix", "--draft-max", "8")


def count_drafted(server: Server, prompt: str, key: str = "", path: str = "/v1/completions", **more: Any) -> int:
    """The tokens that the drafter `suffix` has drafted for an answer; there is no other drafter."""
    body = make_body(path, prompt, limit=40, model="tree", **more)
    answer = server.post(path, json=body, headers={"authorization": f"Bearer {key}"} if key else {})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["timings"]["draft_n"])


def read_tokens(server: Server, text: str, key: str) -> list[int]:
    answer = server.post("/tokenize", json={"content": text}, headers={"x-api-key": key})
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def run_key(tmp_path: Path, command: str, *arguments: str) -> str:
    """What `edgespec key` prints."""
    environment = {**os.environ, "EDGESPEC_DATA_DIR": str(tmp_path / "data")}
    arguments = ("key", command, *arguments, "--file", str(tmp_path / "keys.toml"))
    return subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=True).stdout


def test_keys_have_texts_of_their_own(tmp_path: Path) -> None:
    """Those that ask for it; other keys leave nothing. A key that is removed takes its texts with it."""
    path = tmp_path / "keys.toml"
    first, second = (add_key(path, name, remembers=True) for name in ("first", "second"))
    third = add_key(path, "third")
    with serving(tmp_path, *SUFFIX, "--keys", str(path), "--api-key", KEY) as server:
        for key in (first, second):
            assert count_drafted(server, "xqzv of the sea", key) == 0, "nothing is known of another key's text"
            assert count_drafted(server, "xqzv of the sea", key) > 20
        for key in (third, KEY):
            assert [count_drafted(server, "kwjx of the land", key) for _ in range(2)] == [0, 0]
        kept, dropped = (read_tokens(server, text, first) for text in ("xqzv of the sea", "kwjx of the land"))
    memory = tmp_path / "data" / "memory"
    assert find_bytes(memory, kept) == {"memory.db"} and not find_bytes(tmp_path, dropped)
    listed = run_key(tmp_path, "list").splitlines()
    assert "kept for drafts" in listed[1] and "not kept" in listed[3]
    assert "removed its texts, " in run_key(tmp_path, "rm", "first")
    with serving(tmp_path, *SUFFIX, "--keys", str(path)) as server:
        assert count_drafted(server, "xqzv of the sea", second) > 20
        run_key(tmp_path, "rm", "second")  # while the server has its texts
    assert not find_bytes(memory, kept)


def test_every_interface_uses_the_memory_unless_a_request_says_no(tmp_path: Path) -> None:
    with serving(tmp_path, *SUFFIX) as server:
        for path in PATHS:
            prompt = f"at {path}: "
            assert count_drafted(server, prompt, path=path, memory=False) == 0
            count_drafted(server, prompt, path=path)
            assert count_drafted(server, prompt, path=path) > 20, path
            assert count_drafted(server, prompt, path=path, memory=False) == 0
    assert any("Texts are kept in " in line for line in server.log)


@pytest.mark.parametrize("options", [("--no-memory",), ("--api-key", KEY)])
def test_a_server_without_memory_makes_no_folder(tmp_path: Path, options: tuple[str, ...]) -> None:
    with serving(tmp_path, *TOY, *options) as server:
        assert count_drafted(server, "xqzv of the sea", KEY) >= 0
    assert not (tmp_path / "data" / "memory").exists()


def test_the_only_key_remembers_if_it_is_asked_to(tmp_path: Path) -> None:
    with serving(tmp_path, *SUFFIX, "--api-key", KEY, "--memory") as server:
        assert [count_drafted(server, "xqzv of the sea", KEY) > 20 for _ in range(2)] == [False, True]
