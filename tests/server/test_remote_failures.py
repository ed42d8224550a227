"""Models of another server that is odd or slow, and what it is sent."""

from __future__ import annotations

import json
import socket
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
from tests.server.serving import KEY, Server
from tests.server.test_remote import front, remote

HTML = "<html><body>It works!</body></html>"
HOP = "edgespec-0123456789abcdef"
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
    elif wanted == "huge":
        send(connection, '{"choices": [], "more": "' + "x" * 40_000_000 + '"}')
    elif wanted == "huge error":
        send(connection, '{"error": {"message": "' + "x" * 40_000_000 + '"}}', "500 Internal Server Error")
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
    elif wanted == "long event":
        connection.sendall(b'data: {"choices": "' + b"x" * 5_000_000)
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
    with front(tmp_path_factory.mktemp("odd"), {"odd": table}, "--call-seconds", "6", OTHER_KEY="sk-secret") as made:
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
        ("redirect", 502, "answers with status 302 and not as OpenAI's interface does"),
        ("list", 502, "not as OpenAI's interface does"),
        ("odd", 502, "answers in another form than OpenAI's"),
        ("busy", 429, "the server behind 'odd' answers: slow down."),
        ("fail", 502, "the server behind 'odd' answers: no such thing as [...] at [...]."),
        ("missing", 501, "the server behind 'odd' answers: not here."),
        ("detail", 422, "top_k is too odd"),
        ("overflow", 400, "This model's maximum context length is 4096 tokens."),
        ("cut", 502, "the server behind 'odd' ended the answer early. Try again."),
        ("error", 502, "the server behind 'odd' answers: the GPU is on fire."),
        ("huge", 502, "the server behind 'odd' sends more than 32 MiB at once."),
        ("huge error", 502, "the server behind 'odd' sends more than 32 MiB at once."),
        ("long event", 502, "the server behind 'odd' sends more than 4 MiB at once."),
    ],
)
def test_odd_answers_are_told_in_a_sentence(server: Server, text: str, status: int, told: str) -> None:
    for more in ({}, {"stream": True}):
        response = ask(server, text, **more)
        if text in ("cut", "error", "long event") and more:
            assert response.status_code == 200 and "Hel" in response.text
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
    assert hello["timings"]["predicted_n"] == 2 and "tau" not in hello["timings"] and "warnings" not in hello
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
    assert told.json()["warnings"] == [
        f"{name} is ignored: the other server does not know it." for name in ("draft_max", "memory")
    ]
    body = other.bodies[-1]
    assert body == {
        "model": "there", "messages": [{"role": "user", "content": "hello"}], "service_tier": "flex", "top_k": 3,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"authorization": "Bearer of-the-caller", "x-api-key": "of-the-caller", "cookie": "of-the-caller",
               "x-forwarded-for": "10.0.0.1", "via": f"1.1 caf\xe9, 1.1 {HOP}".encode("latin-1")}  # fmt: skip
    server.post("/v1/messages", headers=headers, json={
        "model": "odd", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}], "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 9},
    })  # fmt: skip
    head, body = other.heads[-1].lower(), other.bodies[-1]
    assert "authorization: bearer sk-secret" in head and f"via: 1.1 {HOP}, 1.1 edgespec-" in head
    assert not any(word in head for word in ("of-the-caller", "cookie", "forwarded", "caf"))
    assert server.openai().models.retrieve("odd").owned_by == "vllm", "a front of this one has to know"
    assert body["chat_template_kwargs"] == {"enable_thinking": True} and body["thinking_token_budget"] == 9
    assert (body["max_tokens"], body["stop"], body["model"]) == (5, ["x"], "there")


def test_what_another_edgespec_may_keep(tmp_path: Path) -> None:
    """Texts of the user of this machine, unless the memory is off; nothing of callers that it cannot tell apart."""
    cases: Any = {"user": ((), None), "off": (("--no-memory",), False), "keys": (("--api-key", KEY), False)}
    with other_server(reply, [{"id": name, "owned_by": "edgespec"} for name in cases]) as other:

        def sent(name: str) -> tuple[object, object]:
            arguments, _ = cases[name]
            with front(tmp_path / name, {"odd": remote(other.url, model=name)}, *arguments) as server:
                asked: Any = {"messages": [{"role": "user", "content": "hello"}], "model": "odd"}
                server.openai().chat.completions.create(**asked, extra_body={"draft_max": 2})
            (body,) = [each for each in other.bodies if each["model"] == name]
            return body.get("memory"), body["draft_max"]

        with ThreadPoolExecutor(3) as pool:
            for name, found in zip(cases, pool.map(sent, cases), strict=True):
                assert found == (cases[name][1], 2)


def test_the_time_of_a_call(server: Server) -> None:
    """An answer that has begun ends with `length`; comments keep its connection open until then. Others fail."""
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(ask, server, text, stream=True) for text in ("silent", "nothing")]
        whole = ask(server, "nothing")
        begun, failed = (stream.result().text.strip().split("\n\n") for stream in streams)
    assert ": keep-alive" in begun and ": keep-alive" in failed
    assert json.loads(begun[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    for error in (whole.json(), json.loads(failed[-1].removeprefix("data: "))):
        assert error["error"]["message"].startswith("the server behind 'odd' did not answer in time.")
    assert whole.status_code == 504


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
