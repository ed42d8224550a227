"""Models of another server: every interface in front of another edgespec."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.server.interfaces import DEMAND, PATHS, ask, stream
from tests.server.serving import EMBEDDED, ENDLESS, KEY, TOY, Server, serving
from tests.server.test_launch import run
from tests.server.test_listeners import VALID, VALID_KEY

MESSAGES: Any = [{"role": "user", "content": "def read_lines(path):"}]
TOOL: Any = {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False,
}}  # fmt: skip


@contextmanager
def front(
    folder: Path, tables: dict[str, dict[str, object]], *arguments: str, port: int = 0, **variables: str
) -> Iterator[Server]:
    """`edgespec serve` with these tables in its configuration."""
    folder.mkdir(exist_ok=True)
    lines = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
             for name, table in tables.items()]  # fmt: skip
    (folder / "models.toml").write_text("\n".join(lines))
    with serving(folder, "--config", "models.toml", *arguments, port=port, **variables) as server:
        yield server


def remote(url: str, **more: object) -> dict[str, object]:
    return {"backend": "openai", "url": url, **more}


@pytest.fixture(scope="module")
def back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("back"), *EMBEDDED, "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def server(back: Server, toy: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tables = {
        "far": remote(f"{back.url}/v1", model="embedded", key_env="BACK_KEY"),
        "endless": remote(toy.url, model="tree", parallel=16),
        "gone": remote("http://127.0.0.1:9/v1"),
        "refused": remote(f"{back.url}/v1", key_env="WRONG_KEY"),
        "keyless": remote(f"{back.url}/v1"),
        "missing": remote(f"{toy.url}/nothing"),
    }
    with front(tmp_path_factory.mktemp("front"), tables, BACK_KEY=KEY, WRONG_KEY="sk-wrong") as made:
        made.until("far", context_size=512)
        yield made


def test_the_list_has_the_context_of_the_other_server(server: Server) -> None:
    listed = {each["id"]: each for each in server.get("/v1/models").json()["data"]}
    assert listed["far"]["context_length"] == 512 and listed["far"]["status"] == {"value": "remote"}
    assert listed["gone"]["context_length"] is None
    assert server.openai().models.retrieve("far").id == "far"
    assert "far:latest" in [each["name"] for each in server.get("/api/tags").json()["models"]]
    assert server.post("/api/show", json={"model": "far"}).json()["model_info"]["edgespec.context_length"] == 512


@pytest.mark.parametrize("path", PATHS)
def test_every_interface_answers_as_the_other_server_does(path: str, server: Server, back: Server) -> None:
    here = ask(server, path, model="far")
    assert here == ask(back, path, model="embedded") and here.ending == "length" and here.written == 24
    assert stream(server, path, model="far") == here


@pytest.mark.parametrize("path", DEMAND)
def test_calls_come_back_in_every_interface(path: str, server: Server) -> None:
    answer = ask(server, path, model="far", limit=200, tool=TOOL)
    ((name, arguments),) = answer.calls
    assert (name, json.loads(arguments), answer.ending) == ("look", {"n": 1}, "tool_calls")


def test_completions(server: Server, toy: Server) -> None:
    """Each copy has its own seed. The toy's scores do not depend on what is computed beside them."""
    asked: Any = {"prompt": ["def a(", [70, 71]], "n": 2, "seed": 3, **ENDLESS, "max_tokens": 6, "temperature": 1}
    here = server.openai().completions.create(model="endless", **asked)
    there = toy.openai().completions.create(model="tree", **asked)
    assert [each.text for each in here.choices] == [each.text for each in there.choices]
    assert len({each.text for each in here.choices}) > 2 and here.usage and here.usage.completion_tokens == 24
    echoed = server.openai().completions.create(model="far", prompt="def a(", echo=True, max_tokens=2)
    assert echoed.choices[0].text.startswith("def a(")
    scored = server.openai().completions.create(model="far", prompt="def a(", max_tokens=2, logprobs=1)
    assert scored.choices[0].logprobs and len(scored.choices[0].logprobs.tokens or ()) == 2
    with pytest.raises(openai.BadRequestError, match="echo with logprobs or token ids needs a model of this server"):
        server.openai().completions.create(model="far", prompt="x", echo=True, logprobs=1)


def test_embeddings(server: Server, back: Server) -> None:
    here, there = server.openai(), back.openai()
    vectors = [client.embeddings.create(model=name, input=["a", "def"]) for client, name in
               ((here, "far"), (there, "embedded"))]  # fmt: skip
    assert vectors[0].data[1].embedding == pytest.approx(vectors[1].data[1].embedding, abs=1e-4)
    assert vectors[0].model == "far" and vectors[0].usage == vectors[1].usage
    with pytest.raises(openai.BadRequestError, match="the model's own size"):
        here.embeddings.create(model="far", input="a", dimensions=3)


def test_counts_and_beginnings_of_anthropics_interface(server: Server, back: Server) -> None:
    asked: Any = {"messages": MESSAGES, "system": "Write Python."}
    here = server.anthropic().messages.create(model="far", max_tokens=1, **asked)
    counted = server.anthropic().messages.count_tokens(model="far", **asked)
    assert counted.input_tokens == here.usage.input_tokens + (here.usage.cache_read_input_tokens or 0)
    begun = [*MESSAGES, {"role": "assistant", "content": "\n    return"}]
    answers = [client.messages.create(model=name, messages=begun, max_tokens=5, temperature=0).content
               for client, name in ((server.anthropic(), "far"), (back.anthropic(), "embedded"))]  # fmt: skip
    assert answers[0] == answers[1]


def test_ollama(server: Server) -> None:
    options = {"num_predict": 8, "temperature": 0, "repeat_penalty": 1.1}
    body = {"model": "far:latest", "prompt": "def f(", "raw": True, "stream": False, "options": options}
    made = server.post("/api/generate", json=body).json()
    assert made["response"] and made["eval_count"] == 8 and made["model"] == "far:latest"
    assert server.post("/api/chat", json={"model": "far", "messages": []}).json()["done_reason"] == "load"
    assert server.post("/api/embed", json={"model": "far", "input": "x"}).json()["embeddings"][0]


def test_results_of_calls_and_schemas(server: Server) -> None:
    """The grammar is the other server's."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
    history: Any = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "3"}]  # fmt: skip
    assert server.openai().chat.completions.create(model="far", messages=history, max_tokens=3).choices
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"n": 1}}}]}
    told: Any = {"role": "tool", "tool_name": "look", "content": "3"}
    body = {"model": "far", "messages": [*MESSAGES, called, told], "stream": False, "options": {"num_predict": 3}}
    assert server.post("/api/chat", json=body).status_code == 200
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False}
    body = {"model": "far", "messages": MESSAGES, "stream": False, "format": schema, "options": {"temperature": 0}}
    assert json.loads(server.post("/api/chat", json=body).json()["message"]["content"]) == {"n": 1}
    response = server.openai().responses.create(
        model="far", input="x", text={"format": {"type": "json_schema", "name": "a", "schema": schema}}
    )
    assert json.loads(response.output_text) == {"n": 1}


def test_what_the_other_server_refuses_is_told_in_each_interface(server: Server) -> None:
    long = "def f(x): " * 600
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().chat.completions.create(model="far", messages=[{"role": "user", "content": long}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > 512 maximum"):
        server.anthropic().messages.create(model="far", messages=[{"role": "user", "content": long}], max_tokens=3)
    image: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(
        openai.BadRequestError, match=r"the server behind 'far' answers: .*'image_url' is not supported"
    ):
        server.openai().chat.completions.create(model="far", messages=[{"role": "user", "content": image}])
    log = "".join(server.log)
    assert "the server behind 'far' answers with status 400" in log and "image_url" not in log


def test_a_server_that_is_gone_or_refuses_the_key(server: Server) -> None:
    cases = {
        "gone": "the server behind 'gone' cannot be reached (",
        "refused": "the server behind 'refused' refuses its key; set WRONG_KEY.",
        "keyless": "the server behind 'keyless' refuses its key; set key_env",
        "missing": "unknown path",
    }
    for name, told in cases.items():
        response = server.ask(name)
        assert response.status_code == (404 if name == "missing" else 502), response.text
        message = response.json()["error"]["message"]
        assert told in message and "127.0.0.1" not in message and "sk-" not in message
        status = 404 if name == "missing" else 502
        with pytest.raises(anthropic.APIStatusError, match="server behind") as caught:
            server.anthropic().messages.create(model=name, messages=MESSAGES, max_tokens=3)
        assert caught.value.status_code == status
    assert server.model("gone")["is_reachable"] is False and server.model("refused")["is_reachable"] is True
    assert server.model("refused")["last_error"] == cases["refused"]
    metrics = server.get("/metrics").text
    assert 'edgespec_remote_up{model="gone"} 0.0' in metrics and 'edgespec_remote_up{model="far"} 1.0' in metrics
    assert 'edgespec_failures_total{kind="other_server",model="gone"}' in metrics
    assert not any(KEY in line or "sk-wrong" in line for line in server.log)


def test_ps_and_stop(server: Server) -> None:
    assert server.ask("far", max_tokens=3).status_code == 200
    shown = run("ps", "--url", server.url).stdout
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()}
    assert rows["far"] == ["remote", "openai", "0"] and rows["gone"] == ["not", "reachable", "openai", "0"]
    assert rows["gone:"] and rows["refused"][0] == "fails"
    for more in ((), ("--now",)):
        stopped = run("stop", "far", *more, "--url", server.url)
        assert stopped.returncode == 2 and "'far' is a model of another server, which manages it" in stopped.stderr
    launched = run("launch", "claude", "--url", server.url)
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW=512" in launched.stdout
    assert "the context of far, 512, leaves no room for an answer: start the server behind it" in launched.stderr
    unknown = run("launch", "codex", "--model", "gone", "--url", server.url)
    assert unknown.returncode == 0 and "the context of gone is not known; 32,768 tokens are assumed" in unknown.stderr


def test_figures_are_counted(server: Server) -> None:
    def read(name: str) -> float:
        lines = [
            line for line in server.get("/metrics").text.splitlines() if line.startswith(f"edgespec_{name}_total{{")
        ]
        return sum(float(line.split()[-1]) for line in lines if 'model="far"' in line)

    names = ("emitted_tokens", "prompt_tokens", "answers")
    before = {name: read(name) for name in names}
    body = server.ask("far", max_tokens=40, draft_max=3).json()
    timings, counted = body["timings"], {name: read(name) - before[name] for name in names}
    assert timings["draft_n"] > 0 and "warnings" not in body
    assert (counted["emitted_tokens"], counted["answers"]) == (40, 1) and counted["prompt_tokens"] > 3
    assert server.ask("far", max_tokens=40, draft_max=0).json()["timings"]["draft_n"] == 0
    recent = server.get("/props").json()["recent"][0]
    assert recent["model"] == "far" and recent["tokens_per_second"] > 0


class Killed(Exception):
    """Leaves a server that does not run any more, and need not end in order."""


def test_a_server_that_is_killed_amid_answers_comes_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    table = remote(f"http://127.0.0.1:{port}", model="tree", parallel=4)
    with front(tmp_path / "front", {"far": table}) as server:
        assert "cannot be reached" in server.ask("far").json()["error"]["message"]
        (tmp_path / "back").mkdir()
        with pytest.raises(Killed), serving(tmp_path / "back", *TOY, port=port) as back:
            asked: Any = {"model": "far", "messages": MESSAGES, "stream": True, "max_tokens": 150_000}
            asked["temperature"] = 0
            openai_stream = server.openai().chat.completions.create(**asked, logit_bias={"256": -100})
            next(openai_stream)
            begun = threading.Event()

            def read() -> None:
                for _ in server.anthropic().messages.create(**asked):
                    begun.set()

            with ThreadPoolExecutor(1) as pool:
                reader = pool.submit(read)
                assert begun.wait(30)
                server.until("far", answering=2)
                engines = back.engines()
                back.process.kill()
                for engine in engines:
                    engine.kill()
                told = "the server behind 'far' ended the"
                with pytest.raises(openai.APIError, match=told):
                    list(openai_stream)
                with pytest.raises(anthropic.APIError, match=told):
                    reader.result(60)
            assert "cannot be reached" in server.ask("far").json()["error"]["message"]
            raise Killed
        (tmp_path / "again").mkdir()
        with serving(tmp_path / "again", *TOY, port=port):
            assert server.ask("far", max_tokens=3).status_code == 200
            assert server.model("far")["is_reachable"] and server.model("far")["last_error"] is None


def test_a_url_that_leads_back_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [each.getsockname()[1] for each in (one, two)]
    urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
    tables = {"self": remote(urls[0]), "round": remote(urls[1])}
    with (
        front(tmp_path / "one", tables, port=ports[0]) as first,
        front(tmp_path / "two", {"round": remote(urls[0])}, port=ports[1]),
    ):
        for name in tables:
            response = first.ask(name)
            assert response.status_code == 508
            assert "the request came back to the server that had sent it" in response.json()["error"]["message"]
        message = first.post("/v1/messages", json={"model": "self", "max_tokens": 3, "messages": MESSAGES}).json()
        assert message["type"] == "error" and "came back" in message["error"]["message"]


def test_certificates_and_names(tmp_path: Path) -> None:
    """A certificate that is not trusted, one that is, a name that is not known, and a key without TLS."""
    (tmp_path / "back").mkdir()
    with serving(tmp_path / "back", *TOY, "--tls-cert", str(VALID), "--tls-key", str(VALID_KEY)) as back:
        tables = {
            "far": remote(f"{back.url}/v1", model="tree"),
            "misnamed": remote("http://box.invalid/v1", key_env="FAR_KEY"),
        }
        with front(tmp_path / "no", tables, FAR_KEY="sk-secret", NO_PROXY="*") as server:
            told = server.ask("far").json()["error"]["message"]
            assert told.startswith("the server behind 'far' cannot be reached (") and "self-signed certificate" in told
            told = server.ask("misnamed").json()["error"]["message"]
            assert "cannot be reached (" in told and "invalid" not in told
            assert any("the key of 'misnamed' crosses the network as plain text" in line for line in server.log)
        with front(tmp_path / "yes", {"far": tables["far"]}, SSL_CERT_FILE=str(VALID)) as server:
            assert server.ask("far", max_tokens=3).status_code == 200
            assert not any("plain text" in line for line in server.log)
