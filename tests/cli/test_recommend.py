"""`edgespec recommend` against a hub on this machine, and without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.hub.hubserver import HubServer
from tests.models import TARGET


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    folder = tmp_path / "served" / "me" / "python-GGUF"
    folder.mkdir(parents=True)
    (folder / "python-Q8_0.gguf").write_bytes(TARGET.read_bytes())
    with HubServer(tmp_path / "served") as running:
        running.state.cards["me/python-GGUF"] = {"downloads": 7, "tags": ["license:mit", "code"]}
        yield running


def test_the_registry_answers_offline_and_says_so(cli: Cli) -> None:
    done = cli("recommend", "--no-speed")
    assert done.returncode == 0
    assert "note: Offline mode is on. This is the registry alone" in done.stderr
    assert "`edgespec chat NAME` downloads and opens it." in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "QUALITY", "DOWNLOAD", "TOK/S", "DRAFTED", "LICENSE"]
    embedded = next(line.split() for line in lines if line.startswith("python-6m"))
    assert embedded == ["python-6m", "toy", "here", "draft", "model", "MIT"]
    assert any(line.endswith(":") for line in lines) and "~" in done.stdout
    reasoning = json.loads(cli("recommend", "qwen3", "--for", "reasoning", "--no-speed", "--json").stdout)
    names = [each["name"] for each in reasoning["models"]]
    assert names and all(name.startswith("qwen3") for name in names) and reasoning["notices"]
    told = cli("recommend", "--for", "agents", "--no-speed").stderr
    assert "Drafts for agents: `--draft ngram+suffix`" in told
    assert "No model matches." in cli("recommend", "nothing-like-it", "--no-speed").stdout


def test_a_search_of_the_hub(cli: Cli, server: HubServer) -> None:
    online = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    done = cli("recommend", "me/python", "--for", "code", "--no-speed", "--json", **online)
    (found,) = json.loads(done.stdout)["models"]
    assert (found["name"], found["origin"], found["license"], found["hub_downloads"]) == (
        "me/python-GGUF",
        "hub",
        "mit",
        7,
    )
    assert found["download_bytes"] == TARGET.stat().st_size and not found["estimated_sizes"]
    assert found["fit"] == "fits" and found["parameters"] == 0.006
    assert json.loads(cli("recommend", "me/python", "--max-size", "0.001", "--json", **online).stdout)["models"] == []


def test_wrong_values(cli: Cli) -> None:
    for wrong in (["--for", "cooking"], ["--max-size", "0"], ["--max-size", "big"]):
        done = cli("recommend", *wrong)
        assert done.returncode == 2 and "hint: Run `edgespec recommend --help`." in done.stderr
