"""Keys of a file: who may call, who may manage models, what is said of callers, and what is kept of their texts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import openai
import pytest

from edgespec.errors import InvalidRequest
from edgespec.server.auth import KeyFile, add_key, read_keys, remove_key
from edgespec.server.record import hash_key
from tests.memory.texts import find_bytes
from tests.server.interfaces import PATHS, make_body
from tests.server.serving import ENDLESS, KEY, TOY, Server, serving
from tests.zygote import run_command


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "config" / "keys.toml"
    laptop, admin = add_key(path, "laptop", may_manage=False), add_key(path, "admin", may_manage=True)
    assert path.stat().st_mode & 0o777 == 0o600 and laptop not in path.read_text()
    file = KeyFile(path)
    found = [file.read().get(hash_key(key)) for key in (laptop, admin, laptop[:-1], "", "\udcff")]
    assert [(each.name, each.may_manage) if each else None for each in found] == [
        ("laptop", False), ("admin", True), None, None, None]  # fmt: skip
    with path.open("a") as text:
        text.write("# of the user\n")
    remove_key(path, "laptop")
    assert [each.name for each in file.read().values()] == ["admin"]
    assert path.stat().st_mode & 0o777 == 0o600 and "# of the user" in path.read_text()
    path.write_text("[damaged")
    assert hash_key(admin) in file.read(), "the keys read before stay valid"
    path.write_text("")
    assert not file.read()
    added = add_key(path, "again", may_manage=False)
    assert hash_key(added) in file.read()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has no key"),
        ("[a]\nsha256 = x", "at line 2"),
        ("a = 1", r"\[a\] is no entry of a key"),
        ("[a]\nsha256 = 'abc'", r"\[a\] is no entry of a key \(sha256: "),
        (f"[a]\nsha256 = '{'0' * 64}'\nmanage = 1", r"\(manage: Input should be a valid boolean"),
        (f"[a]\nsha256 = '{'0' * 64}'\nmanages = true", r"\(manages: "),
        (f"['a b']\nsha256 = '{'0' * 64}'", "cannot have the name 'a b'"),
    ],
)
def test_a_file_that_is_damaged(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=fault) as refusal:
        KeyFile(path)
    assert "a b" in text or f"edgespec key add NAME --file {path}" in refusal.value.hint


def test_what_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, "laptop", may_manage=False)
    for name, fault in (("laptop", "has a key 'laptop' already"), ("a.b", "cannot have the name 'a.b'")):
        with pytest.raises(InvalidRequest, match=fault):
            add_key(path, name, may_manage=False)
    with pytest.raises(InvalidRequest, match="has no key 'other'"):
        remove_key(path, "other")
    path.write_text(path.read_text().replace("[laptop]", "[ laptop ]"))
    with pytest.raises(InvalidRequest, match=r"has no key 'laptop' in a line \[laptop\]"):
        remove_key(path, "laptop")
    assert len(read_keys(path)) == 1
    path.chmod(0o620)
    with pytest.raises(InvalidRequest, match="other users can write"):
        read_keys(path)


def test_callers_by_name(tmp_path: Path) -> None:
    """Requests, tokens and failures of each key, a stream that its client leaves, and one that breaks."""
    path = tmp_path / "keys.toml"
    laptop, admin = add_key(path, "laptop", may_manage=False), add_key(path, "admin", may_manage=True)
    with serving(tmp_path, *TOY, "--keys", str(path), "--api-key", KEY) as server:
        headers = {"authorization": f"Bearer {laptop}"}
        answer = ask(server, laptop, max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError):
            ask(server, laptop, max_tokens=3, temperature=-1, user="a secret")
        with pytest.raises(openai.AuthenticationError):
            ask(server, "wrong", max_tokens=3)
        refused = server.post("/models/unload", json={"model": "tree"}, headers=headers)
        assert refused.status_code == 403 and refused.json()["error"]["type"] == "permission_error"
        ollama = {"model": "tree", "keep_alive": 0}
        assert server.post("/api/generate", json=ollama, headers=headers).status_code == 403
        with stream(server, laptop) as parts:  # which the client leaves
            next(parts)
        with stream(server, laptop) as parts:
            next(parts)
            server.engines()[0].kill()
            assert "SIGKILL" in "".join(parts)
        for key in (admin, KEY):
            assert server.post("/models/unload", json={"model": "tree"}, headers={"x-api-key": key}).status_code == 200
        lines = wait_for_lines(server, 9)
        metrics = server.get("/metrics", headers=headers).text
        remove_key(path, "laptop")
        assert server.get("/v1/models", headers=headers).status_code == 401
        assert server.get("/v1/models", headers={"x-api-key": admin}).status_code == 200
    said = [re.sub(r" \d+\.\d{3}s| tokens_per_second=\S+| accepted=\S+", "", each) for each in lines]
    chat = "POST /v1/chat/completions"
    tokens = sum(int(each) for line in lines for each in re.findall(r"key=laptop.* tokens=(\d+)", line))
    left = next(each for each in said if "the client left" in each)
    assert re.fullmatch(rf'INFO {chat} 200 key=laptop model=tree prompt_tokens=\d+ tokens=\d+ end=cancelled '
                        r'error="the client left\."', left)  # fmt: skip
    said.remove(left)
    broken = f"ERROR {chat} 200 key=laptop model=tree error=\"the engine's process ended with SIGKILL"
    assert sum(each.startswith(broken) for each in said) == 1
    said = [each for each in said if not each.startswith(broken)]
    assert re.fullmatch(rf"INFO {chat} 200 key=laptop model=tree prompt_tokens=\d+ tokens=3 end=length", said[0])
    assert said[1].startswith(f'WARNING {chat} 400 key=laptop error="temperature: ') and "secret" not in said[1]
    assert said[2:] == [
        f'WARNING {chat} 401 error="the API key is missing or wrong."',
        'WARNING POST /models/unload 403 key=laptop error="this caller may not manage models."',
        'WARNING POST /api/generate 403 key=laptop error="this caller may not manage models."',
        "INFO POST /models/unload 200 key=admin model=tree",
        "INFO POST /models/unload 200 key=api-key model=tree",
    ]
    assert 'edgespec_requests_total{key="laptop",status="200"} 3.0' in metrics
    assert 'edgespec_requests_total{key="",status="401"} 1.0' in metrics
    assert f'edgespec_key_tokens_total{{key="laptop",kind="generated"}} {tokens}.0' in metrics and tokens > 3
    assert not any(key in line for key in (laptop, admin) for line in server.log)


@contextmanager
def stream(server: Server, key: str) -> Iterator[Iterator[str]]:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **ENDLESS}
    url, headers = f"{server.url}/v1/chat/completions", {"authorization": f"Bearer {key}"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        yield response.iter_text()


def wait_for_lines(server: Server, count: int) -> list[str]:
    """The lines of `count` requests, without their times."""
    for _ in range(400):
        found = re.findall(r"^[\d-]{10} [\d:]{8} ((?:INFO|WARNING|ERROR) (?:GET|POST) .*)$", "".join(server.log), re.M)
        if len(found) >= count:
            return found
        sleep(0.05)
    raise AssertionError(server.log)


def ask(server: Server, key: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": "x"}]
    return server.openai(api_key=key).chat.completions.create(model="tree", messages=messages, **options)


LONG = ("tree", "--backend", "toy", "--ctx", "1000")
SUFFIX = (*LONG, "--draft", "suffix", "--draft-max", "8")


def count_drafted(server: Server, prompt: str, key: str = "", path: str = "/v1/completions", **more: Any) -> int:
    """The tokens that the drafter `suffix` has drafted for an answer; there is no other drafter."""
    body = make_body(path, prompt, limit=40, model="tree", **more)
    answer = server.post(path, json=body, headers={"authorization": f"Bearer {key}"} if key else {})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["timings"]["draft_n"])


def run_key(tmp_path: Path, command: str, *arguments: str) -> str:
    """What `edgespec key` prints."""
    environment = {**os.environ, "EDGESPEC_DATA_DIR": str(tmp_path / "data")}
    arguments = ("key", command, *arguments, "--file", str(tmp_path / "keys.toml"))
    done = run_command(arguments, environment, tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
        kept, dropped = ([*text.encode()] for text in ("xqzv of the sea", "kwjx of the land"))
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


def test_a_server_without_memory_makes_no_folder(tmp_path: Path) -> None:
    with serving(tmp_path, *LONG, "--api-key", KEY) as server:
        assert count_drafted(server, "xqzv of the sea", KEY) >= 0
    assert not (tmp_path / "data" / "memory").exists()


def test_the_only_key_remembers_if_it_is_asked_to(tmp_path: Path) -> None:
    with serving(tmp_path, *SUFFIX, "--api-key", KEY, "--memory") as server:
        assert [count_drafted(server, "xqzv of the sea", KEY) > 20 for _ in range(2)] == [False, True]
