"""Concurrent requests, clients that disconnect or do not read, engines that crash, models that are unloaded."""

from __future__ import annotations

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.server.serving import EMBEDDED, ENDLESS, TOY, Server, serving

TREE = "tree"
LEFT = 'failures_total{kind="client_left",model="tree"}'
NEAR_TIE = 0.1  # logits have a standard deviation of about 3; other rows of a forward change each by about 0.02


def raw(server: Server, body: dict[str, Any], version: str = "1.1") -> socket.socket:
    """A connection on which a chat has been asked for."""
    address = urlsplit(server.url)
    data = json.dumps({"model": TREE, "messages": [{"role": "user", "content": "x"}], **body}).encode()
    caller = socket.create_connection((address.hostname, address.port), timeout=30)
    head = (f"POST /v1/chat/completions HTTP/{version}", "host: localhost", "content-type: application/json",
            f"content-length: {len(data)}", "", "")  # fmt: skip
    caller.sendall("\r\n".join(head).encode() + data)
    return caller


def answers(server: Server, name: str = "answers_total{") -> float:
    """How many answers are over, as /metrics counts them, or what it counts as `name`."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"edgespec_{name}"))


def test_a_caller_who_leaves_ends_its_answer(toy: Server) -> None:
    for stream in (True, False):
        before, left = answers(toy), answers(toy, LEFT)
        caller = raw(toy, {**ENDLESS, "stream": stream})
        toy.until(TREE, is_busy=True)
        if stream:
            assert b"200 OK" in caller.recv(4096)
        caller.close()
        toy.until(TREE, is_busy=False, seconds=5)
        assert answers(toy) == before + 1
        end = monotonic() + 20
        while answers(toy, LEFT) != left + 1:
            assert monotonic() < end


def test_a_caller_who_closes_its_sending_half_gets_its_answer(toy: Server) -> None:
    toy.ask(TREE, max_tokens=3)  # a model that is being loaded is busy too
    for stream in (True, False):
        with raw(toy, {**ENDLESS, "max_tokens": 3000, "stream": stream}) as caller:
            toy.until(TREE, is_busy=True)
            caller.shutdown(socket.SHUT_WR)
            received = b""
            while chunk := caller.recv(65536):
                received += chunk
        interim, _, final = received.rpartition(b"HTTP/1.1 200 OK\r\n")
        assert not interim.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") and bool(interim) != stream
        assert b'"finish_reason":"length"' in final.replace(b'": ', b'":') and (b"[DONE]" in final) == stream
        toy.until(TREE, is_busy=False)


def test_a_caller_who_closes_one_half_and_then_leaves(toy: Server) -> None:
    before = answers(toy, LEFT)
    with raw(toy, {**ENDLESS, "stream": False}) as caller:
        toy.until(TREE, is_busy=True)
        caller.shutdown(socket.SHUT_WR)
        sleep(0.5)
    toy.until(TREE, is_busy=False, seconds=10)
    assert answers(toy, LEFT) == before + 1


def test_a_body_that_ends_early_ends_its_connection(toy: Server) -> None:
    address = urlsplit(toy.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as caller:
        caller.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
        sleep(0.2)
        caller.shutdown(socket.SHUT_WR)
        assert not caller.recv(65536)


def test_a_caller_of_http_1_0_who_closes_its_sending_half_has_left(toy: Server) -> None:
    toy.ask(TREE, max_tokens=3)
    before = answers(toy)
    with raw(toy, {**ENDLESS, "stream": False}, version="1.0") as caller:
        toy.until(TREE, is_busy=True)
        caller.shutdown(socket.SHUT_WR)
        assert not caller.recv(65536)
    toy.until(TREE, is_busy=False)
    assert answers(toy) == before + 1


def test_abrupt_ends(toy: Server) -> None:
    toy.ask(TREE, max_tokens=3)
    engine = toy.engines()[0].pid
    for n in range(80):
        caller = raw(toy, {**ENDLESS, "stream": bool(n % 2)})
        if n % 3 == 0:
            sleep(0.01)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset in place of a farewell
        caller.close()
    toy.until(TREE, is_busy=False, waiting=0, seconds=60)
    assert toy.ask(TREE, max_tokens=5).json()["usage"]["completion_tokens"] == 5
    assert toy.engines()[0].pid == engine


def test_a_caller_who_does_not_read_holds_nobody_up(toy: Server) -> None:
    caller = raw(toy, {**ENDLESS, "max_tokens": 6_000, "stream": True})
    toy.until(TREE, is_busy=True)
    began_s = monotonic()
    assert toy.ask(TREE, max_tokens=5).status_code == 200
    assert monotonic() - began_s < 60
    with caller:
        unload = b""
        while chunk := caller.recv(2**20):
            unload += chunk
            if unload.endswith(b"0\r\n\r\n"):
                break
    assert b"[DONE]" in unload and unload.count(b"data: ") > 10


def test_too_many_callers_are_told_when_to_come_back(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY, "--queue", "2", "--parallel", "1") as server:
        assert server.ask(TREE, max_tokens=3).status_code == 200
        callers = [raw(server, {**ENDLESS, "stream": True})]
        server.until(TREE, is_busy=True, waiting=0)
        callers += [raw(server, {**ENDLESS, "stream": True}) for _ in range(2)]
        server.until(TREE, waiting=2)
        refused = server.ask(TREE, max_tokens=3)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        for caller in callers:
            caller.close()
        server.until(TREE, is_busy=False, waiting=0)
        assert server.ask(TREE, max_tokens=3).status_code == 200
        assert 'edgespec_failures_total{kind="busy",model="tree"} 1.0' in server.get("/metrics").text


def test_a_short_answer_does_not_wait_for_long_ones(toy: Server) -> None:
    callers = [raw(toy, {**ENDLESS, "stream": True}) for _ in range(3)]
    toy.until(TREE, answering=3, waiting=0)
    assert toy.ask(TREE, max_tokens=5).status_code == 200
    assert toy.model(TREE)["answering"] == 3
    more = [raw(toy, {**ENDLESS, "stream": True}) for _ in range(3)]
    toy.until(TREE, answering=4, waiting=2)
    assert toy.post("/v1/messages/count_tokens", json={"model": TREE, "messages": []}).status_code == 400
    for caller in (*callers, *more):
        caller.close()
    toy.until(TREE, answering=0, waiting=0)


def test_an_answer_that_takes_too_long_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY, "--call-seconds", "0.5") as server:
        assert server.ask(TREE, max_tokens=1).status_code in (200, 504), "loading counts"
        server.until(TREE, is_open=True)
        body = server.ask(TREE, **ENDLESS).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert 0 < body["usage"]["completion_tokens"] < 150_000


def test_an_engine_that_dies_is_told_of_and_opened_again(toy: Server) -> None:
    callers = [raw(toy, {**ENDLESS, "stream": True}) for _ in range(3)]
    toy.until(TREE, answering=3)
    for caller in callers:
        assert b"200 OK" in caller.recv(4096)
    toy.engines()[0].send_signal(signal.SIGKILL)
    for caller in callers:
        unload = b""
        with caller:
            while b"SIGKILL" not in unload:
                unload += (chunk := caller.recv(65536))
                assert chunk, unload[-1000:]
    toy.until(TREE, is_open=False, is_busy=False)
    assert toy.ask(TREE, max_tokens=5).status_code == 200


def test_who_leaves_while_a_model_opens_does_not_spoil_it_for_the_next(tmp_path: Path) -> None:
    """Loading measures the cost of forwards for two seconds; impatient clients must not restart it."""
    with serving(tmp_path, "embedded=python-6m", "--threads", "1", "--ctx", "512") as server:
        caller = raw(server, {"model": "embedded", "stream": True})
        while not server.engines():
            sleep(0.02)
        (engine,) = server.engines()
        patient = ThreadPoolExecutor(1).submit(server.ask, "embedded", max_tokens=3)
        server.until("embedded", is_busy=True)
        caller.close()
        assert patient.result(60).status_code == 200
        assert [each.pid for each in server.engines()] == [engine.pid]


def test_a_model_that_makes_way_while_others_call_it(tmp_path: Path) -> None:
    """A model unloads while requests wait for it and for another model: all of them finish."""
    arguments = ("a=tree", "b=linear", "--backend", "toy", "--draft", "none", "--ctx", "200000")
    with serving(tmp_path, *arguments) as server, ThreadPoolExecutor(8) as pool:
        assert server.ask("b", max_tokens=3).status_code == 200
        long = pool.submit(server.ask, "b", **{**ENDLESS, "max_tokens": 3000})
        server.until("b", is_busy=True)
        stopped = pool.submit(server.post, "/models/unload", json={"model": "b"})
        sleep(0.1)
        calls = [pool.submit(server.ask, "b", max_tokens=3), pool.submit(server.ask, "a", max_tokens=3)]
        calls += [pool.submit(server.ask, name, max_tokens=3) for name in "ab"]
        assert {call.result(40).status_code for call in (long, stopped, *calls)} == {200}
        server.until("a", is_busy=False)
        server.until("b", is_busy=False)


def test_what_cannot_be_sent_to_an_engine_holds_nobody_up(toy: Server) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    assert toy.ask(TREE, chat_template_kwargs=deep, max_tokens=3).status_code in (200, 400)
    for _ in range(100):
        deep = {"a": deep}
    assert "nested" in toy.ask(TREE, chat_template_kwargs=deep, max_tokens=3).json()["error"]["message"]
    call = {"id": "1", "function": {"name": "f", "arguments": "[" * 600 + "]" * 600}}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}, {"role": "user", "content": "x"}]
    body = {"model": TREE, "messages": messages, "max_tokens": 3}
    assert toy.post("/v1/chat/completions", json=body).status_code in (200, 400)
    assert toy.ask(TREE, max_tokens=3).status_code == 200


def test_memory_stays_as_it_is(toy: Server) -> None:
    def resident() -> int:
        parent = psutil.Process(toy.process.pid)
        return sum(each.memory_info().rss for each in (parent, toy.engines()[0]))

    def call(n: int) -> int:
        return toy.ask(TREE, f"question {n % 7}", max_tokens=10, stream=bool(n % 2)).status_code

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(call, range(100))) == {200}
        before = resident()
        assert set(pool.map(call, range(200))) == {200}
    grown = resident() - before
    assert grown < 16 * 2**20, f"{grown / 2**20:.1f} MiB"


def fork_gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The logprob gap in `one` at the first token in which two greedy answers differ."""
    pairs = zip(one["logprobs"]["content"], other["logprobs"]["content"], strict=True)
    ours, theirs = next(pair for pair in pairs if pair[0]["token"] != pair[1]["token"])
    (second,) = [top["logprob"] for top in ours["top_logprobs"] if top["token"] == theirs["token"]]
    return float(ours["logprob"] - second)


def test_a_real_model_under_all_of_this(tmp_path: Path) -> None:
    """Eight requests among clients that disconnect: each gets the answer it gets alone, except at near-ties."""
    asked = {"max_tokens": 24, "logprobs": True, "top_logprobs": 5}  # the other token of a near-tie is among five
    prompts = [f"def function_{n}(value):\n    " for n in range(8)]
    with serving(tmp_path, *EMBEDDED, "--parallel", "6") as server:
        alone = [server.ask("embedded", prompt, **asked).json()["choices"][0] for prompt in prompts]
        assert server.model("embedded")["shares_forwards"]
        gone = [raw(server, {"model": "embedded", "max_tokens": 400, "stream": bool(n % 2)}) for n in range(6)]
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(server.ask, "embedded", prompt, **asked) for prompt in prompts]
            for caller in gone:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                caller.close()
                sleep(0.05)
            together = [call.result(60).json()["choices"][0] for call in calls]
        for one, other in zip(alone, together, strict=True):
            assert one["message"] == other["message"] or fork_gap(one, other) < NEAR_TIE
        server.until("embedded", answering=0, waiting=0)
        assert server.ask("embedded", max_tokens=3).status_code == 200
