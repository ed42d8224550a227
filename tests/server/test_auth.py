"""API keys, host names, origins and the size limit of bodies."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.server.serving import KEY, TOY, Server, serving
from tests.zygote import run_command

CALL: dict[str, Any] = {"model": "tree", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key that allows one other origin."""
    folder = tmp_path_factory.mktemp("locked")
    with serving(
        folder, *TOY, "--api-key", KEY, "--allow-origin", "HTTP://Pages.Example:3000/", "--allow-host", "box.lan"
    ) as it:
        yield it


def test_a_key(locked: Server) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": KEY[:-1]}):
        response = locked.post("/v1/chat/completions", json=CALL, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert locked.get("/props", headers=headers).status_code == 401
        assert locked.get("/metrics", headers=headers).status_code == 401
    assert locked.post("/v1/messages", json=CALL).json()["error"]["type"] == "authentication_error"
    for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}):
        assert locked.post("/v1/chat/completions", json=CALL, headers=headers).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        locked.openai(api_key="wrong").models.list()
    assert locked.get("/health").json()["status"] == "ok"
    assert locked.get("/").status_code == 200, "the page asks for the key itself"


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:99", 200), ("box.lan:1", 200), ("BOX.LAN", 200), ("evil.example", 403),
     ("127.0.0.1.evil.example", 403), ("", 403)],
)  # fmt: skip
def test_host_names(host: str, status: int, locked: Server) -> None:
    """DNS rebinding: a page whose host name resolves to this address gets no answers."""
    assert locked.get("/health", headers={"host": host}).status_code == status


def test_origins(locked: Server) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    other = locked.post("/v1/chat/completions", json=CALL, headers={**headers, "origin": "http://evil.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
    own = locked.post("/v1/chat/completions", json=CALL, headers={**headers, "origin": locked.url})
    assert own.status_code == 200
    allowed = {"origin": "http://pages.example:3000"}
    response = locked.post("/v1/chat/completions", json=CALL, headers={**headers, **allowed})
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == allowed["origin"]
    asks = {**allowed, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    private = {**asks, "access-control-request-private-network": "true"}
    for preflight in (asks, private):
        answer = httpx.options(f"{locked.url}/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == allowed["origin"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert httpx.options(locked.url, headers={**asks, "origin": "http://evil.example"}).status_code == 400


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost:3000", 200), ("https://127.0.0.1", 200), ("http://[::1]:8080", 200), ("app://obsidian.md", 200),
     ("tauri://localhost", 200), ("http://tauri.localhost", 200),
     ("http://localhost.evil.example", 403),
     ("http://evil.example/#http://localhost", 403),
     ("null", 403)],
)  # fmt: skip
def test_pages_and_programs_of_this_machine_may_call(origin: str, status: int, locked: Server) -> None:
    headers = {"authorization": f"Bearer {KEY}", "origin": origin}
    response = locked.post("/v1/chat/completions", json=CALL, headers=headers)
    assert response.status_code == status
    assert response.headers.get("access-control-allow-origin") == (origin if status == 200 else None)


def test_such_pages_may_not_manage_models(toy: Server) -> None:
    """Without keys a caller on this machine may, and a page of another program may not."""
    body = {"model": "tree"}
    page = toy.post("/models/load", json=body, headers={"origin": "http://localhost:3000"})
    message = page.json()["error"]["message"]
    assert page.status_code == 403 and "may not manage" in message and "--allow-origin" in message
    assert toy.post("/models/load", json=body).status_code == 200
    assert toy.post("/models/load", json=body, headers={"origin": toy.url}).status_code == 200


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(locked: Server) -> None:
    """What one program takes for the end of such a request, another takes for the beginning of the next."""
    body = json.dumps(CALL).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {KEY}\r\nContent-Type: application/json"
    )
    lengths = f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n"
    address = urlsplit(locked.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(f"{head}\r\n{lengths}".encode() + body + b"\r\n0\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and b"two lengths" in answer


@pytest.mark.parametrize(("named", "status"), [("localhost", b"200 OK"), ("evil.example", b"403 Forbidden")])
def test_a_whole_address_in_the_request_line(named: str, status: bytes, locked: Server) -> None:
    """As proxies send it: its host counts, whatever the header says."""
    address = urlsplit(locked.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = f"GET http://{named}/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 " + status), answer


def test_pages_of_allowed_origins_can_read_refusals(locked: Server) -> None:
    origin = {"origin": "http://pages.example:3000"}
    keyed = {**origin, "authorization": f"Bearer {KEY}"}
    refusals = [
        locked.get("/props", headers=origin),
        locked.get("/health", headers={**origin, "host": "evil.example"}),
        locked.post("/v1/messages", headers=keyed, content=b" " * (17 * 2**20)),
    ]
    assert [each.status_code for each in refusals] == [401, 403, 413]
    assert {each.headers.get("access-control-allow-origin") for each in refusals} == {origin["origin"]}


def test_bodies_that_are_too_large(toy: Server) -> None:
    large = b" " * (17 * 2**20)
    response = toy.post("/v1/chat/completions", content=large, headers={"content-type": "application/json"})
    assert response.status_code == 413 and "larger than" in response.json()["error"]["message"]

    address = urlsplit(toy.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = "Host: localhost\r\nContent-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode())
        assert connection.recv(2**16).startswith(b"HTTP/1.1 413 ")  # before any of it has been sent

    def chunks() -> Iterator[bytes]:
        for _ in range(17):
            yield b" " * 2**20

    response = toy.post("/v1/messages", content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 413 and response.json()["error"]["type"] == "request_too_large"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "other machines could use a server at 0.0.0.0 without a key"),
        (["--host", "no.such.host.invalid", "--no-key"], "cannot listen on"),
        (["a=tree", "a=linear"], "two models have the name 'a'"),
        (["=tree"], "lacks a name or a model"),
        (["--allow-origin", "*"], "any web page could use a server without a key"),
        (["--allow-origin", "localhost:3000"], "'localhost:3000' is not the origin of a web page"),
        (["--allow-origin", "http://a/b"], "'http://a/b' is not the origin of a web page"),
    ],
    ids=["no key", "no host", "twice", "no name", "any page", "no scheme", "a path"],
)
def test_invalid_options_are_rejected(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_command(["serve", "--port", "0", *arguments], os.environ, tmp_path)
    assert done.returncode == 2 and message.casefold() in done.stderr.casefold() and "Traceback" not in done.stderr


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_command(["serve", "--port", port], os.environ, Path.cwd())
    assert done.returncode == 2 and f"port {port}: Address already in use" in done.stderr


def test_paths(toy: Server) -> None:
    assert toy.post("/v1/chat/completions/", json=CALL).status_code == 200
    assert toy.get("/v1/models/").json() == toy.get("/v1/models").json()
    missing, wrong = toy.get("/v1/nothing"), toy.get("/v1/chat/completions")
    unnamed = toy.get("/v1/models/other")
    codes = [(each.status_code, each.json()["error"]["code"]) for each in (missing, wrong, unnamed)]
    assert codes == [(404, None), (405, None), (404, "model_not_found")] and wrong.headers["allow"] == "POST"
    assert {each.json()["error"]["type"] for each in (missing, wrong, unnamed)} == {"invalid_request_error"}


def test_nothing_of_a_prompt_is_logged(toy: Server) -> None:
    toy.ask("tree", "a secret of mine", max_tokens=3)
    toy.ask("tree", "a secret of mine", max_tokens=0)
    assert not any("secret" in line for line in toy.log) and any(
        " model=tree prompt_tokens=" in line for line in toy.log
    )
