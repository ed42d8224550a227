"""Which models are loaded, and for how long: preloading, `keep_alive`, loading and unloading over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.server.serving import TOY, Server, serving
from tests.server.test_launch import run
from tests.zygote import run_command

CONFIG = """
[brief]
model = "tree"
backend = "toy"
keep-alive = 1

[lasting]
model = "tree"
backend = "toy"
keep-alive = -1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("residency")
    (folder / "models.toml").write_text(CONFIG)
    arguments = ("other=tree", "--backend", "toy", "--config", "models.toml", "--keep-alive", "10m")
    with serving(folder, *arguments, "--open-at-most", "3", "--preload", "lasting") as made:
        yield made


def until_health(server: Server) -> dict[str, Any]:
    end = monotonic() + 20
    while (response := server.get("/health")).status_code != 200:
        assert response.json()["status"] == "loading" and monotonic() < end, response.text
        sleep(0.02)
    return dict(response.json())


def test_a_model_is_loaded_at_the_start_and_health_waits_for_it(server: Server) -> None:
    state = until_health(server)
    assert (state["loaded_models"], state["loading_models"]) == (1, 0)
    lasting = server.model("lasting")
    assert lasting["state"] == "loaded" and lasting["unloads_in_seconds"] is lasting["keep_alive_seconds"] is None
    (running,) = server.get("/api/ps").json()["models"]
    assert running["model"] == "lasting:latest" and datetime.fromisoformat(running["expires_at"]).year > 2100
    states = {each["id"]: each["status"]["value"] for each in server.get("/v1/models").json()["data"]}
    assert states == {"brief": "unloaded", "lasting": "loaded", "other": "unloaded"}


def test_each_model_stays_for_its_own_time_and_calls_change_it(server: Server) -> None:
    assert server.ask("brief", max_tokens=1).status_code == 200
    assert server.ask("other", max_tokens=1).status_code == 200
    server.until("brief", state="unloaded")
    assert server.model("other")["state"] == "loaded" and 500 < server.model("other")["unloads_in_seconds"] <= 600
    assert server.ask("other", max_tokens=1, ttl=7200).status_code == 200  # LM Studio's name
    assert server.model("other")["keep_alive_seconds"] == 7200
    assert server.ask("other", max_tokens=1).status_code == 200
    assert server.model("other")["keep_alive_seconds"] == 7200, "until the model is unloaded"
    shown = run("ps", "--url", server.url).stdout.splitlines()
    assert [line.split()[0] for line in shown[1:]] == ["brief", "lasting", "other"]
    assert shown[2].endswith("never") and shown[3].endswith("in 120 min") and "unloaded" in shown[1]
    body = {"model": "other", "prompt": "x", "stream": False, "options": {"num_predict": 1}, "keep_alive": "0s"}
    assert "warnings" not in server.post("/api/generate", json=body).json()
    server.until("other", state="unloaded", keep_alive_seconds=600)
    faulty = server.ask("other", ttl="soon")
    assert faulty.status_code == 400 and "neither seconds nor a duration" in faulty.json()["error"]["message"]


def test_models_are_loaded_and_unloaded(server: Server) -> None:
    assert server.post("/models/load", json={"model": "brief", "keep_alive": "1h"}).json() == {"success": True}
    assert server.model("brief")["state"] == "loaded" and server.model("brief")["keep_alive_seconds"] == 3600
    assert server.post("/models/unload", json={"model": "brief"}).json() == {"success": True}
    assert server.model("brief")["state"] == "unloaded" and server.model("brief")["keep_alive_seconds"] == 1
    assert server.post("/models/load", json={"model": "nothing"}).status_code == 404
    assert server.post("/models/load", json={"model": "brief", "keep_alive": "1h"}).json() == {"success": True}
    assert server.post("/models/unload", json={"model": "brief", "now": True}).json() == {"success": True}
    server.until("brief", state="unloaded", keep_alive_seconds=1)
    loaded = server.post("/api/generate", json={"model": "brief", "keep_alive": 60}).json()
    assert loaded["done_reason"] == "load" and server.model("brief")["keep_alive_seconds"] == 60
    (_, running) = sorted(
        server.get("/api/ps").json()["models"], key=lambda each: str(each["expires_at"]), reverse=True
    )
    assert 0 < (datetime.fromisoformat(running["expires_at"]) - datetime.now(UTC)).total_seconds() <= 60


def test_the_one_used_least_lately_makes_way_once_there_is_no_place(tmp_path: Path) -> None:
    models = [f"{name}=tree" for name in "abc"]
    with serving(tmp_path, *models, "--backend", "toy", "--open-at-most", "2") as server:
        for name in "ab":
            assert server.ask(name, max_tokens=1).status_code == 200
        server.post("/models/unload", json={"model": "b"})
        for name, loaded in (("c", "ac"), ("b", "bc")):
            assert server.ask(name, max_tokens=1).status_code == 200
            assert "".join(each for each in "abc" if server.model(each)["state"] == "loaded") == loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preload", "trees"), "--preload names no model: 'trees'."),
        (("--keep-alive", "soon"), "'soon' is neither seconds nor a duration such as '10m'."),
    ],
)
def test_options_that_cannot_be(arguments: tuple[str, ...], message: str) -> None:
    done = run("serve", *TOY, *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("model", "code", "told"),
    [
        ("no-such-model", 3, "there is no model called 'no-such-model'"),
        ("./nothing.gguf", 3, "there is no file nothing.gguf"),
        ("x=./damaged.gguf", 5, "damaged.gguf"),
        ("./text.md", 5, "'text.md' is not a gguf file"),
    ],
)
def test_a_model_that_cannot_be_opened_is_refused_at_the_start(
    model: str, code: int, told: str, tmp_path: Path
) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "text.md").write_text("no model")
    done = run_command(["serve", "--port", "0", model], os.environ, tmp_path)
    assert done.returncode == code and told in done.stderr.lower() and "hint:" in done.stderr and not done.stdout
