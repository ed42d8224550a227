"""/api/pull against a real local hub: progress, shared and stopped downloads, faults, and who may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgespec.server.key_file import add_key
from tests.hub.hubserver import HubServer
from tests.hub.hubstate import Fault
from tests.models import TARGET
from tests.server.serving import KEY, SMALL, Server, serving

OTHER, SERVED, STALLED = "me/other-GGUF", "me/python-GGUF", "me/stalled-GGUF"
FILE = "python-Q8_0.gguf"
SIZE = TARGET.stat().st_size


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    root = tmp_path_factory.mktemp("hub")
    for repo in (OTHER, SERVED, STALLED):
        (root / repo).mkdir(parents=True)
        (root / repo / FILE).write_bytes(TARGET.read_bytes())
    with HubServer(root) as running:
        yield running


@pytest.fixture(scope="module")
def server(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--draft", "none", "--threads", "1", "--ctx", "128", "--api-key", KEY, "--strict-names")
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, f"coder=hf:{SERVED}/{FILE}", *options, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0") as made:
        yield made


def pull(server: Server, model: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return server.post("/api/pull", json={"model": model, **more}, headers=headers)


def test_progress_and_use(server: Server, hub: HubServer) -> None:
    *lines, last = [json.loads(line) for line in pull(server, "coder:latest").text.splitlines()]
    assert last == {"status": "success"}
    assert lines[-1]["status"] == f"pulling {FILE}" and lines[-1]["completed"] == lines[-1]["total"] == SIZE
    assert lines[-1]["digest"].startswith("sha256:")
    n_downloads = len(hub.downloads(FILE))
    assert pull(server, "coder", stream=False).json() == {"status": "success"}
    body = {"model": "coder", "prompt": "def f", "max_tokens": 3, "temperature": 0}
    answer = server.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
    assert len(hub.downloads(FILE)) == n_downloads, "what is here is not downloaded again"


def test_a_model_that_is_not_served(server: Server) -> None:
    done = pull(server, f"hf.co/{OTHER}:Q8_0", stream=False).json()
    assert done["status"] == "success" and "was not started with it" in done["warnings"][0]


def test_a_download_is_shared_and_stops_when_all_have_left(server: Server, hub: HubServer) -> None:
    name = f"hf:{STALLED}/{FILE}"
    hub.fault(STALLED, FILE, Fault("stall", at=SIZE // 2))
    ask: Any = {"json": {"model": name}, "headers": {"authorization": f"Bearer {KEY}"}, "timeout": 60}
    with httpx.stream("POST", f"{server.url}/api/pull", **ask) as staying:
        with httpx.stream("POST", f"{server.url}/api/pull", **ask) as leaving:
            lines = staying.iter_lines()
            firsts = [next(lines), next(leaving.iter_lines())]
            assert all(json.loads(line)["total"] == SIZE for line in firsts) and hub.state.stalled.wait(60)
        hub.fault(STALLED, FILE, None)
        hub.state.released.set()
        *_, last = lines
    assert json.loads(last)["status"] == "success"
    parts = [each.range for each in hub.downloads(FILE) if STALLED in each.path]
    assert len(set(parts)) == len(parts), "no part was downloaded twice"


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("", 400, "names no model"),
        ("me/absent-GGUF:Q8_0", 503, "no repository me/absent-GGUF"),
        ("no such alias", 404, "no such alias"),
        ("/etc/passwd", 400, "only models of the hub can be pulled."),
        ("./models.toml", 400, "only models of the hub can be pulled."),
        ("package:python-6m/draft.gguf", 400, "only models of the hub can be pulled."),
    ],
)
def test_faults(server: Server, model: str, status: int, message: str) -> None:
    done = pull(server, model)
    assert message in done.json()["error"] and done.status_code == status, done.text


def test_only_managers_may(tmp_path: Path, server: Server) -> None:
    assert server.post("/api/pull", json={"model": "coder"}).status_code == 401
    key = add_key(tmp_path / "keys.toml", "app", may_manage=False)
    with serving(tmp_path, *SMALL, "--keys", str(tmp_path / "keys.toml")) as guarded:
        refused = guarded.post("/api/pull", json={"model": "x"}, headers={"authorization": f"Bearer {key}"})
        assert refused.status_code == 403 and "may not" in refused.json()["error"], refused.text
