"""ps, stop and launch against a running server."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.server.serving import KEY, TOY, Server, serving
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
    assert run("stop", "tree", "--url", toy.url).stdout == "unloaded tree\n"
    assert run("ps", "--url", toy.url).stdout.splitlines()[1].split()[:2] == ["tree", "unloaded"]
    missing = run("stop", "other", "--url", toy.url)
    assert missing.returncode == 2 and "there is no model 'other' here" in missing.stderr
    assert toy.ask("tree", max_tokens=3).status_code == 200


def test_the_embedded_model_has_a_second_name(pair: Server) -> None:
    answers = [pair.ask(name, max_tokens=6).json() for name in ("embedded", "python-6m")]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_no_server() -> None:
    for command in (["ps"], ["stop", "x"], ["launch", "aider"]):
        done = run(*command, "--url", "http://127.0.0.1:9")
        assert done.returncode == 4 and "No edgespec server answers" in done.stderr, done.stderr
        assert "(connection refused)" in done.stderr and "Errno" not in done.stderr, done.stderr
    assert "No edgespec server" in run("ps", "--url", "not a url").stderr


def test_a_key_is_needed(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY, "--api-key", KEY) as server:
        assert "API key is missing" in run("ps", "--url", server.url).stderr
        assert run("ps", "--url", server.url, "--api-key", KEY).returncode == 0


@pytest.mark.parametrize("client", ["aider", "claude", "codex", "continue", "llm", "open-webui", "opencode", "zed"])
def test_settings_of_clients(client: str, toy: Server) -> None:
    done = run("launch", client, "--url", toy.url, "--model", "tree", "--api-key", "the key")
    assert done.returncode == 0 and toy.url in done.stdout and ("tree" in done.stdout or client == "open-webui")
    assert done.stderr.startswith("# for ")
    if done.stdout.startswith(("{", "[\n")):
        json.loads(done.stdout)
    elif client == "codex":
        import tomllib

        assert tomllib.loads(done.stdout)["model_providers"]["edgespec"]["wire_api"] == "responses"
    else:
        assert "export " in done.stdout and "'the key'" in done.stdout
    assert run("launch", client, "--url", toy.url, "--model", "other").returncode == 2
