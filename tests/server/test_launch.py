"""ps, stop and launch against a running server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

from edgespec.cli.launch import _CLIENTS, _warn_of_context
from edgespec.folders import cache_folder
from tests.gguf_models import REPOSITORY
from tests.server.serving import ENDLESS, KEY, SMALL, TOY, Server, serving
from tests.zygote import run_command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = run_command(arguments, os.environ, Path.cwd())
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_ps_and_stop(toy: Server) -> None:
    toy.ask("tree", max_tokens=3)
    shown = run("ps", "--url", toy.url).stdout.splitlines()
    assert shown[0].split() == ["MODEL", "STATE", "RUNTIME", "DRAFT", "MEMORY", "WAITING", "UNLOADS"]
    assert shown[1].split()[:4] == ["tree", "loaded", "toy", "ngram+model"] and shown[1].endswith("in 5 min")
    assert re.search(
        r"^tree: [\d.]+ tok/s \([\d.]+ ms a token, p99 of a step [\d.]+ ms\), median of", "\n".join(shown), re.M
    )
    assert json.loads(run("ps", "--url", toy.url, "--json").stdout)["models"][0]["is_open"]
    assert run("stop", "tree", "--url", toy.url).stdout == "tree is unloaded\n"
    assert run("ps", "--url", toy.url).stdout.splitlines()[1].split()[:2] == ["tree", "unloaded"]
    missing = run("stop", "other", "--url", toy.url)
    assert missing.returncode == 3 and "There is no model 'other' here" in missing.stderr
    assert f"hint: `edgespec ps --url {toy.url}` lists its models." in missing.stderr
    assert toy.ask("tree", max_tokens=3).status_code == 200


def test_stop_says_what_it_waits_for(toy: Server) -> None:
    body = {"model": "tree", "messages": [{"role": "user", "content": "x"}], "stream": True, **ENDLESS}
    command = [sys.executable, "-m", "edgespec", "stop", "tree", "--url", toy.url]
    with httpx.stream("POST", f"{toy.url}/v1/chat/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()  # the stream is closed with it
        next(lines)
        toy.until("tree", answering=1)
        stopping = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert stopping.stderr is not None
        assert "waiting for 1 answer of tree; --now ends them" in stopping.stderr.readline()
    stopping.stderr.close()
    assert stopping.wait(60) == 0


def test_no_server() -> None:
    for command in (["ps"], ["stop", "x"], ["launch", "aider"]):
        done = run(*command, "--url", "http://127.0.0.1:9")
        assert done.returncode == 4 and "No edgespec server answers" in done.stderr, done.stderr
        assert "(connection refused)" in done.stderr and "Errno" not in done.stderr, done.stderr
    unclear = run("ps", "--url", "not a url").stderr
    assert "No edgespec server" in unclear and "hint: Give a URL, such as http://" in unclear


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """The URL of a server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


NOT_OURS = "{url} answers, but is no edgespec server."


@pytest.mark.parametrize(
    ("status", "body", "code", "told"),
    [
        (200, '{"default_generation_settings": {}}', 4, NOT_OURS),
        (200, '{"error": "Unexpected endpoint"}', 4, NOT_OURS),
        (200, "[]", 4, NOT_OURS),
        (200, "<html>", 4, NOT_OURS),
        (404, '{"detail": "Not Found"}', 4, NOT_OURS),
        (404, '{"error": "not found"}', 2, "The server rejects the request: not found."),
    ],
)
def test_another_programs_server(status: int, body: str, code: int, told: str) -> None:
    with answering(status, body) as url:
        for command in (["ps"], ["stop", "x"], ["launch", "aider"]):
            done = run(*command, "--url", url)
            assert (done.returncode, done.stdout) == (code, ""), done.stderr
            assert done.stderr.startswith(f"error: {told.format(url=url)}\nhint: "), done.stderr


def test_a_key_is_needed(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY, "--api-key", KEY) as server:
        assert "API key is missing" in run("ps", "--url", server.url).stderr
        assert run("ps", "--url", server.url, "--api-key", KEY).returncode == 0


CLIENTS = ["aider", "claude", "cline", "codex", "llm", "opencode", "qwen"]
CLAUDE = """#!{python}
import os, sys
import anthropic
made = anthropic.Anthropic().messages.create(
    model=os.environ["ANTHROPIC_MODEL"], max_tokens=int(os.environ["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]),
    messages=[{{"role": "user", "content": "Hi"}}])
print(made.usage.output_tokens, os.environ["CLAUDE_CODE_AUTO_COMPACT_WINDOW"])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("launch"), *SMALL, "--api-key", KEY) as made:
        yield made


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the first on the path; the settings are used in `tmp_path`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def install(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def read_settings(text: str) -> Any:
    return json.loads(text) if text.startswith(("{", "[\n")) else text


@pytest.mark.parametrize("client", CLIENTS)
def test_no_key_is_named_where_the_server_has_none(client: str, small: Server) -> None:
    done = run("launch", client, "--url", small.url)
    assert done.returncode == 0 and small.url in done.stdout, done.stderr
    needed = {"aider", "claude", "cline", "qwen"}  # which do not start without one
    assert ("none" in done.stdout) == (client in needed)
    assert "EDGESPEC_API_KEY" not in done.stdout and "apiKey" not in done.stdout
    assert run("launch", client, "--url", f"{small.url}/v1").stdout == done.stdout, "the URL that `serve` prints"
    assert "256" in done.stdout or client in ("cline", "llm", "qwen"), "the context of the model"


def test_the_context_is_known_before_the_first_call(server: Server) -> None:
    assert run("stop", "tree", "--url", server.url, "--api-key", KEY).returncode == 0
    done = run("launch", "codex", "--url", server.url, "--api-key", KEY)
    assert "loading tree" in done.stderr
    settings = tomllib.loads(done.stdout)
    assert settings["model_context_window"] == 256
    assert settings["model_providers"]["edgespec"]["env_key"] == "EDGESPEC_API_KEY"
    opencode = read_settings(run("launch", "opencode", "--url", server.url, "--api-key", KEY).stdout)
    (model,) = opencode["provider"]["edgespec"]["models"].values()
    assert model["limit"] == {"context": 256, "output": 64}
    assert any("tree: loaded, with a context of 256 tokens" in line for line in server.log)


def test_claude_runs_from_its_settings(server: Server, programs: Path) -> None:
    install(programs, "claude", CLAUDE.format(python=sys.executable))
    done = run("launch", "claude", "--url", server.url, "--api-key", KEY)
    assert "these settings were tried with claude 2." in done.stderr
    assert "about 27,000 tokens, and the context of tree, 256, leaves no room" in done.stderr
    assert "restart the server with --ctx 65536" in done.stderr
    ran = subprocess.run(["bash", "-euc", done.stdout], capture_output=True, text=True, timeout=60, check=False)
    tokens, window = ran.stdout.split()
    assert 0 < int(tokens) <= 64 and window == "256", ran.stderr


def test_aider_knows_the_context(server: Server, programs: Path) -> None:
    import litellm

    install(programs, "aider", '#!/bin/sh\necho "$@" "$OPENAI_API_BASE" "$OPENAI_API_KEY"\n')
    done = run("launch", "aider", "--url", server.url, "--api-key", KEY)
    ran = subprocess.run(["bash", "-euc", done.stdout], capture_output=True, text=True, timeout=60, check=True)
    file = cache_folder() / "aider.model.metadata.json"
    assert ran.stdout.split() == [
        *(["--model", "openai/tree", "--model-metadata-file", str(file)]),
        f"{server.url}/v1",
        *KEY.split(),
    ]
    litellm.register_model(json.loads(file.read_text()))
    info = litellm.get_model_info("openai/tree")
    assert (info["max_input_tokens"], info["max_output_tokens"], info["input_cost_per_token"]) == (256, 64, 0)


PACKAGES = {
    "aider": "aider-chat==",
    "claude": "@anthropic-ai/claude-code@",
    "cline": "cline@",
    "codex": "@openai/codex@",
    "opencode": "opencode-ai@",
    "qwen": "@qwen-code/qwen-code@",
}


def test_a_release_tries_the_versions_that_are_named() -> None:
    commands = (REPOSITORY / "Makefile").read_text(encoding="utf-8").split()
    assert {f"{package}{_CLIENTS[name].tried}" for name, package in PACKAGES.items()} <= {*commands}


@pytest.mark.parametrize(
    ("context", "trained", "told"),
    [
        (8192, None, "leaves no room for an answer: restart the server with --ctx 16384"),
        (8192, 8192, "was trained for 8,192 and is too small for it: take a model with a longer context"),
        (8192, 131_072, "restart the server with --ctx 16384"),
        (9_800, None, ""),
    ],
)
def test_a_prompt_and_an_answer_need_room(context: int, trained: int | None, told: str) -> None:
    model = {"name": "m", "trained_context": trained, "state": "loaded"}
    lines = list(_warn_of_context("opencode", _CLIENTS["opencode"], model, context))
    assert told in " ".join(lines) and bool(told) == bool(lines)


def test_a_prompt_that_does_not_fit_is_logged(server: Server) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": "tree", "messages": [{"role": "user", "content": "x" * 3000}], "max_tokens": 4}
    assert server.post("/v1/messages", json=body, headers=headers).status_code == 400
    end = monotonic() + 10
    while not any("tokens, the context holds 256." in line for line in server.log):
        assert monotonic() < end, server.log
        sleep(0.02)
