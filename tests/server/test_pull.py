"""/api/pull against a real local hub: progress, shared and stopped downloads, faults, and who may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgespec.server.auth import add_key
from tests.hub.hubserver import HubServer
from tests.hub.hubstate import Fault
from tests.models import TARGET
from tests.server.serving import KEY, SMALL, Server, serving

OTHER, SERVED, STALLED, LEFT = "me/other-GGUF", "me/python-GGUF", "me/stalled-GGUF", "me/left-GGUF"
FILE = "python-Q8_0.gguf"
SIZE = TARGET.stat().st_size


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    root = tmp_path_factory.mktemp("hub")
    for repo in (OTHER, SERVED, STALLED, LEFT):
        (root / repo).mkdir(parents=True)
        (root / repo / FILE).write_bytes(TARGET.read_bytes())
    with HubServer(root) as running:
        yield running


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model outside of the cache, which a test moves away."""
    path = tmp_path_factory.mktemp("own") / FILE
    path.write_bytes(TARGET.read_bytes())
    return path


@pytest.fixture(scope="module")
def server(hub: HubServer, moved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--draft", "none", "--threads", "1", "--ctx", "128", "--api-key", KEY, "--strict-names")
    folder = tmp_path_factory.mktemp("server")
    models = f"coder=hf:{SERVED}/{FILE}", f"local={moved}"
    with serving(folder, *models, *options, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0",
                 HF_HUB_DOWNLOAD_TIMEOUT="5") as made:  # fmt: skip
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


def test_who_asks_for_the_same_model_waits_for_the_download(server: Server, hub: HubServer) -> None:
    name = f"hf:{STALLED}/{FILE}"
    hub.state.stalled.clear()
    hub.state.released.clear()
    hub.fault(STALLED, FILE, Fault("stall", at=SIZE // 2))
    ask: Any = {"json": {"model": name}, "headers": {"authorization": f"Bearer {KEY}"}, "timeout": 60}
    with ThreadPoolExecutor(1) as pool, httpx.stream("POST", f"{server.url}/api/pull", **ask) as first:
        lines = first.iter_lines()
        assert json.loads(next(lines))["total"] == SIZE and hub.state.stalled.wait(60)
        second = pool.submit(pull, server, name, stream=False)
        hub.fault(STALLED, FILE, None)
        hub.state.released.set()
        *_, last = lines
        assert json.loads(last)["status"] == second.result(60).json()["status"] == "success"
    parts = [each.range for each in hub.downloads(FILE) if STALLED in each.path]
    assert parts.count(f"bytes=0-{SIZE - 1}") == 1, "the second caller goes on where the first was"


def test_a_stalled_download_stops_when_its_caller_has_left(server: Server, hub: HubServer) -> None:
    """The hub holds the connection; the file's lock is free after the client's timeout, and the next caller goes on."""
    name = f"hf:{LEFT}/{FILE}"
    hub.state.stalled.clear()
    hub.state.released.clear()
    hub.fault(LEFT, FILE, Fault("stall", at=SIZE // 2))
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{server.url}/api/pull"
    with httpx.stream("POST", url, json={"model": name}, headers=headers, timeout=60) as leaving:
        lines = leaving.iter_lines()  # which closes the connection when it is deleted
        assert next(lines) and hub.state.stalled.wait(60)
    hub.fault(LEFT, FILE, None)
    assert pull(server, name, stream=False).json()["status"] == "success"
    assert not hub.state.released.is_set()
    last = [each.range or "" for each in hub.downloads(FILE) if LEFT in each.path][-1]
    assert last.endswith(f"-{SIZE - 1}") and not last.startswith("bytes=0-"), "what had arrived is kept"
    hub.state.released.set()


def test_a_model_is_deleted(server: Server, hub: HubServer, moved: Path) -> None:
    """Not while it is loaded, whatever it is called. A loaded model whose own file is gone does not matter."""

    def delete(model: str) -> httpx.Response:
        return httpx.request("DELETE", f"{server.url}/api/delete", json={"model": model}, headers=headers, timeout=60)

    headers = {"authorization": f"Bearer {KEY}"}
    assert httpx.request("DELETE", f"{server.url}/api/delete", json={"model": "coder"}).status_code == 401
    assert pull(server, f"hf.co/{OTHER}:Q8_0", stream=False).json()["status"] == "success"
    assert server.post("/models/load", json={"model": "local"}, headers=headers).status_code == 200
    moved.unlink()
    assert delete(f"hf.co/{OTHER}:Q8_0").status_code == 200
    gone = delete(f"hf.co/{OTHER}:Q8_0")
    assert gone.status_code == 404 and "is not downloaded" in gone.json()["error"]
    load = {"json": {"model": "coder"}, "headers": headers}
    assert server.post("/models/load", **load).status_code == 200
    for name in ("coder:latest", f"hf.co/{SERVED}:Q8_0", f"hf:{SERVED}/{FILE}"):
        refused = delete(name)
        assert refused.status_code == 409 and "the loaded model 'coder' uses" in refused.json()["error"], refused.text
    assert server.post("/models/unload", **load).status_code == 200
    n_downloads = len(hub.downloads(FILE))
    assert delete("coder").status_code == 200
    assert server.post("/models/load", **load).status_code == 200
    assert len(hub.downloads(FILE)) > n_downloads, "the next load downloads it again"
    for name, status in (("/etc/passwd", 400), ("no such alias", 404), ("embedded", 404), ("", 400)):
        assert delete(name).status_code == status, name


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("", 400, "names no model"),
        ("me/absent-GGUF:Q8_0", 503, "no repository me/absent-GGUF"),
        ("no such alias", 404, "no such alias"),
        ("/etc/passwd", 400, "is not a model of the hub."),
        ("./models.toml", 400, "is not a model of the hub."),
        ("package:python-6m/draft.gguf", 400, "is not a model of the hub."),
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
