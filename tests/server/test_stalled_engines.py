"""An engine that hangs, stops or loads for too long: its callers are told, others go on, and it opens again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import httpx
import pytest

from tests.server.serving import ENDLESS, TOY, Server, serving
from tests.server.test_launch import run

TREE = "tree"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stalled")
    with serving(folder, *TOY, "--parallel", "2", "--silence-seconds", "4") as made:
        yield made


def until_health(server: Server, status: int) -> httpx.Response:
    end = monotonic() + 20
    while (response := server.get("/health")).status_code != status:
        assert monotonic() < end, response.text
        sleep(0.05)
    return response


def metric(server: Server, name: str) -> float:
    (line,) = [each for each in server.get("/metrics").text.splitlines() if each.startswith(f"{name}{{")]
    return float(line.split()[-1])


def test_a_stopped_engine_is_told_of_ended_and_opened_again(server: Server) -> None:
    assert server.ask(TREE, max_tokens=3).status_code == 200
    assert server.get("/health").json()["status"] == "ok" and metric(server, "edgespec_silent_seconds") < 2
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(lambda: server.ask(TREE, "x", **ENDLESS))
        server.until(TREE, answering=1)
        (engine,) = server.engines()
        engine.send_signal(signal.SIGSTOP)
        large = pool.submit(server.ask, TREE, "more than a pipe holds " * 20_000, max_tokens=3)
        stalled = until_health(server, 503).json()
        assert (stalled["status"], stalled["stalled_models"]) == ("stalled", 1)
        assert metric(server, "edgespec_silent_seconds") > 1
        assert "silent for" in run("ps", "--url", server.url).stdout
        for call in (whole, large):
            error = call.result(60).json()["error"]
            assert error["type"] == "server_error"
            assert error["message"].startswith("the engine said nothing for 4 seconds and was ended. The next request")
    assert not engine.is_running() or engine.status() == "zombie"
    assert server.ask(TREE, max_tokens=3).status_code == 200
    until_health(server, 200)
    assert metric(server, "edgespec_engine_deaths_total") == 1
    assert any("tree: the engine said nothing for 4 seconds" in line for line in server.log)


def test_stop_now_ends_a_model_whatever_it_does(server: Server) -> None:
    assert server.ask(TREE, max_tokens=3).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: server.ask(TREE, "x", **ENDLESS))
        server.until(TREE, answering=1)
        server.engines()[0].send_signal(signal.SIGSTOP)
        assert run("stop", TREE, "--now", "--url", server.url).stdout == "tree is unloaded\n"
        assert call.result(60).json()["error"]["message"].startswith("the model was stopped.")
    assert not server.model(TREE)["is_open"]
    assert server.ask(TREE, max_tokens=3).status_code == 200


def test_a_call_ends_in_time_though_its_engine_does_not_answer(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY, "--call-seconds", "2") as server:
        server.until(TREE, is_open=False)
        server.ask(TREE, max_tokens=1)
        server.until(TREE, is_open=True)
        server.engines()[0].send_signal(signal.SIGSTOP)
        late = server.ask(TREE, max_tokens=3, stream=True)
        assert "the answer did not end within 2 seconds" in late.text
        counted = server.anthropic().messages
        with pytest.raises(Exception, match="did not answer within 2 seconds"):
            counted.count_tokens(model=TREE, messages=[{"role": "user", "content": "x"}])
        server.engines()[0].send_signal(signal.SIGCONT)
        assert server.ask(TREE, max_tokens=3).status_code == 200


def test_one_schema_stops_nobody(server: Server) -> None:
    """19 kB of patternProperties, in one schema and spread over tools, are more than the time of a grammar allows."""
    patterns = {f"^k{i}_": {"type": "string"} for i in range(1000)}
    schema = {"type": "object", "patternProperties": patterns}
    forms = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    refused = server.ask(TREE, max_tokens=3, response_format=forms)
    assert refused.status_code == 400 and "it is too complex" in refused.json()["error"]["message"]
    function = {"type": "object", "patternProperties": {f"^k{i}_": {} for i in range(60)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": function}} for i in range(20)]
    spread = server.ask(TREE, max_tokens=3, tools=tools, tool_choice="required")
    assert spread.status_code == 200 or "it is too complex" in spread.json()["error"]["message"]
