"""Models of another server that is odd, slow, dies in the middle of an answer, or is this very server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.server.other_server import OtherServer, begin_stream, delta, other_server, send, send_event
from tests.server.serving import ENDLESS, KEY, TOY, Server, serving
from tests.server.test_listeners import VALID, VALID_KEY
from tests.server.test_remote import MESSAGES, front, remote

HTML = "<html><body>It works!</body></html>"
LEAK = "no such thing as sk-secret at 127.0.0.1"


def reply(connection: socket.socket, data: bytes) -> None:
    """What the prompt asks for."""
    body = json.loads(data)
    wanted = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    if wanted == "html":
        send(connection, HTML, kind="text/html")
    elif wanted == "html 404":
        send(connection, HTML, "404 Not Found", "text/html")
    elif wanted == "redirect":
        send(connection, "", "302 Found", location="http://127.0.0.1:9/v1")
    elif wanted == "busy":
        send(connection, '{"error": {"message": "slow down"}}', "429 Too Many Requests", retry_after="7")
    elif wanted == "fail":
        send(connection, json.dumps({"error": {"message": LEAK}}), "500 Internal Server Error")
    elif wanted == "missing":
        send(connection, '{"error": "not here"}', "501 Not Implemented")
    elif wanted == "detail":
        send(connection, '{"detail": [{"loc": ["body"], "msg": "top_k is too odd"}]}', "422 Unprocessable Entity")
    elif wanted == "overflow":
        text = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
        send(connection, json.dumps({"object": "error", "message": text}), "400 Bad Request")
    elif wanted == "list":
        send(connection, "[1, 2]")
    elif wanted == "whole":
        message = {"role": "assistant", "content": "all at once"}
        send(connection, json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}))
    elif wanted == "nothing":
        sleep(20)
    else:
        begin_stream(connection)
        stream(connection, wanted, usage)


def stream(connection: socket.socket, wanted: str, usage: dict[str, int]) -> None:
    if wanted == "odd":
        send_event(connection, {"choices": [3]})
    send_event(connection, delta(role="assistant", content=""))
    send_event(connection, delta(content="Hel"))
    if wanted == "endless":
        while True:
            send_event(connection, delta(content="."))
            sleep(0.01)
    elif wanted == "silent":
        sleep(20)
    elif wanted == "error":
        send_event(connection, {"error": {"message": "the GPU is on fire", "code": 500}})
    elif wanted == "cut":
        pass
    elif wanted == "think":
        send_event(connection, delta(reasoning="because"))
        send_event(connection, delta("content_filter", content="lo"))
        send_event(connection, "[DONE]")
    elif wanted == "calls":
        for index, name in enumerate(("a", "b")):
            send_event(connection, delta(tool_calls=[{"index": index, "id": name, "function": {"name": name}}]))
            for text in ('{"x"', ": 1}"):
                send_event(connection, delta(tool_calls=[{"index": index, "function": {"arguments": text}}]))
        send_event(connection, delta("stop"))
    else:
        connection.sendall(b": comment\r\n\r\ndata:" + json.dumps(delta("stop", content="lo")).encode() + b"\r\n\r\n")
        send_event(connection, {"choices": [], "usage": usage})
        send_event(connection, "[DONE]")


@pytest.fixture(scope="module")
def other() -> Iterator[OtherServer]:
    listed = {"id": "there", "owned_by": "vllm", "max_model_len": 4096}
    with other_server(reply, [listed, {"id": "more"}]) as made:
        yield made


@pytest.fixture(scope="module")
def server(other: OtherServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    table = remote(other.url, model="there", key_env="OTHER_KEY")
    with front(tmp_path_factory.mktemp("odd"), {"odd": table}, "--call-seconds", "7", OTHER_KEY="sk-secret") as made:
        yield made


def ask(server: Server, text: str, **more: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", json={
        "model": "odd", "messages": [{"role": "user", "content": text}], **more
    })  # fmt: skip


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        ("html", 502, "the server behind 'odd' answers with text/html, not as OpenAI's interface does. Check url"),
        ("html 404", 502, "answers with status 404 and not as OpenAI's interface does. Check url"),
        ("redirect", 502, "redirects to another address"),
        ("list", 502, "not as OpenAI's interface does"),
        ("odd", 502, "answers in another form than OpenAI's"),
        ("busy", 429, "the server behind 'odd' is busy. Try again in 7 seconds."),
        ("fail", 502, "the server behind 'odd' failed: no such thing as ... at 127.0.0.1."),
        ("missing", 501, "not here. (The server behind 'odd' says so.)"),
        ("detail", 422, "top_k is too odd. (The server behind 'odd' says so.)"),
        ("overflow", 400, "This model's maximum context length is 4096 tokens."),
        ("nothing", 504, "the server behind 'odd' did not answer in time."),
        ("cut", 502, "the server behind 'odd' ended the answer early. Try again."),
        ("error", 502, "the server behind 'odd' failed: the GPU is on fire."),
    ],
)
def test_odd_answers_are_told_in_a_sentence(server: Server, text: str, status: int, told: str) -> None:
    for more in ({}, {"stream": True}):
        response = ask(server, text, **more)
        if text in ("cut", "error", "nothing") and more:
            assert response.status_code == 200 and ("Hel" in response.text) == (text != "nothing")
            error = json.loads(response.text.strip().split("data: ")[-1])["error"]
        else:
            assert response.status_code == status, response.text
            error = response.json()["error"]
        assert told in error["message"]
        assert text != "busy" or response.headers["retry-after"] == "7"
    log = "".join(server.log)
    assert "sk-secret" not in log and "top_k is too odd" not in log


def test_an_error_amid_a_stream_is_told_in_each_interface(server: Server) -> None:
    asked: Any = {"model": "odd", "messages": [{"role": "user", "content": "error"}], "max_tokens": 9}
    with pytest.raises(openai.APIError, match="the GPU is on fire"):
        list(server.openai().chat.completions.create(stream=True, **asked))
    with pytest.raises(anthropic.APIError, match="the GPU is on fire"):
        list(server.anthropic().messages.create(stream=True, **asked))
    with pytest.raises(openai.APIError, match="the GPU is on fire"):
        list(server.openai().responses.create(model="odd", input="error", stream=True))
    assert "the GPU is on fire" in server.post("/api/chat", json=asked).text.splitlines()[-1]


def test_forms_of_answers(server: Server) -> None:
    """A whole answer in place of a stream, events with other ends of lines, reasoning by its other name, calls."""
    assert ask(server, "whole").json()["choices"][0]["message"]["content"] == "all at once"
    hello = ask(server, "hello").json()
    assert hello["choices"][0]["message"]["content"] == "Hello" and hello["usage"]["total_tokens"] == 7
    assert set(hello["timings"]) == {"prompt_n", "predicted_n", "predicted_per_second"} and "warnings" not in hello
    thought = ask(server, "think").json()
    assert thought["choices"][0]["message"]["reasoning_content"] == "because"
    assert thought["choices"][0]["finish_reason"] == "content_filter" and "reports no usage" in thought["warnings"][0]
    asked: Any = {"model": "odd", "messages": [{"role": "user", "content": "think"}], "max_tokens": 9}
    assert server.anthropic().messages.create(**asked).stop_reason == "refusal"
    filtered = server.openai().responses.create(model="odd", input="think")
    assert filtered.incomplete_details and filtered.incomplete_details.reason == "content_filter"
    calls = ask(server, "calls").json()["choices"][0]
    assert calls["finish_reason"] == "tool_calls"
    assert [each["function"] for each in calls["message"]["tool_calls"]] == [
        {"name": name, "arguments": '{"x": 1}'} for name in "ab"
    ]


def test_what_is_sent(server: Server, other: OtherServer) -> None:
    """The name there, the key of that server, the fields of the caller; not his headers, nor what concerns this one."""
    told = ask(
        server, "hello", service_tier="flex", top_k=3, draft_max=2, memory=False, keep_alive="5m", max_tokens=-1, n=1
    )
    assert told.json()["warnings"] == ["draft_max is ignored: the other server is no edgespec."]
    body = other.bodies[-1]
    assert body == {
        "model": "there", "messages": [{"role": "user", "content": "hello"}], "service_tier": "flex", "top_k": 3,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"authorization": "Bearer of-the-caller", "x-api-key": "of-the-caller", "cookie": "of-the-caller",
               "x-forwarded-for": "10.0.0.1"}  # fmt: skip
    server.post("/v1/messages", headers=headers, json={
        "model": "odd", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}], "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 9},
    })  # fmt: skip
    head, body = other.heads[-1].lower(), other.bodies[-1]
    assert "authorization: bearer sk-secret" in head and "via: 1.1 edgespec-" in head
    assert not any(word in head for word in ("of-the-caller", "cookie", "forwarded"))
    assert body["chat_template_kwargs"] == {"enable_thinking": True} and body["thinking_token_budget"] == 9
    assert (body["max_tokens"], body["stop"], body["model"]) == (5, ["x"], "there")


def test_what_another_edgespec_may_keep(tmp_path: Path) -> None:
    """Texts of the user of this machine, unless the memory is off; nothing of callers that it cannot tell apart."""
    with other_server(reply, [{"id": "odd", "owned_by": "edgespec"}]) as other:
        cases = {"user": ((), None), "off": (("--no-memory",), False), "keys": (("--api-key", KEY), False)}
        for name, (arguments, memory) in cases.items():
            with front(tmp_path / name, {"odd": remote(other.url)}, *arguments) as server:
                asked: Any = {"messages": [{"role": "user", "content": "hello"}], "model": "odd"}
                server.openai().chat.completions.create(**asked, extra_body={"draft_max": 2})
                assert (other.bodies[-1].get("memory"), other.bodies[-1]["draft_max"]) == (memory, 2)


def test_the_time_of_a_call(server: Server) -> None:
    """An answer that has begun ends with `length`; comments keep its connection open until then."""
    events = ask(server, "silent", stream=True).text.split("\n\n")
    assert ": keep-alive" in events
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_a_client_that_leaves_closes_the_request(server: Server, other: OtherServer) -> None:
    other.left.clear()
    body = {"model": "odd", "messages": [{"role": "user", "content": "endless"}], "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    assert other.left.wait(10)
    server.until("odd", answering=0)
    other.left.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": False}, timeout=0.5)
    assert other.left.wait(10)


def test_a_server_that_is_killed_amid_answers_comes_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    table = remote(f"http://127.0.0.1:{port}", model="tree", parallel=4)
    with front(tmp_path / "front", {"far": table}) as server:
        assert "cannot be reached" in server.ask("far").json()["error"]["message"]
        (tmp_path / "back").mkdir()
        with pytest.raises(AssertionError), serving(tmp_path / "back", *TOY, port=port) as back:
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
                back.process.kill()
                for engine in back.engines():
                    engine.kill()
                told = "the server behind 'far' ended the"
                with pytest.raises(openai.APIError, match=told):
                    list(openai_stream)
                with pytest.raises(anthropic.APIError, match=told):
                    reader.result(60)
            assert "cannot be reached" in server.ask("far").json()["error"]["message"]
            raise AssertionError
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
            assert f"the url of '{name}' leads back to this server" in response.json()["error"]["message"]
        message = first.post("/v1/messages", json={"model": "self", "max_tokens": 3, "messages": MESSAGES}).json()
        assert message["type"] == "error" and "leads back" in message["error"]["message"]


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
            assert told.startswith(
                "the server behind 'far' has a certificate that is not trusted (self-signed certificate"
            )
            told = server.ask("misnamed").json()["error"]["message"]
            assert "cannot be reached (its name is not known)" in told and "invalid" not in told
            assert any("the key of 'misnamed' crosses the network as plain text" in line for line in server.log)
        with front(tmp_path / "yes", {"far": tables["far"]}, SSL_CERT_FILE=str(VALID)) as server:
            assert server.ask("far", max_tokens=3).status_code == 200
            assert not any("plain text" in line for line in server.log)


def test_keys_and_the_queue_of_this_server(tmp_path: Path, toy: Server) -> None:
    table = remote(toy.url, model="tree", parallel=1)
    with front(tmp_path, {"far": table}, "--api-key", KEY, "--queue", "0") as server:
        assert server.ask("far").status_code == 401
        client = server.openai()
        asked: Any = {"model": "far", "messages": MESSAGES, "stream": True, **ENDLESS}
        stream = client.chat.completions.create(**asked)
        next(stream)
        with pytest.raises(openai.RateLimitError, match="requests are waiting"):
            client.chat.completions.create(**asked)
        stream.close()
