"""Clients of a draft server: who is refused, by whom, and what a session costs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from edgespec.drafters import drafter_specs
from edgespec.drafters.remote.drafter import RemoteDraft, parse_address
from edgespec.drafters.remote.link import Mirror
from edgespec.drafters.remote.messages import Ask
from edgespec.engine.drafting import LoadedDrafter
from edgespec.engine.engine import Engine
from edgespec.errors import DraftRefused, InvalidRequest
from edgespec.server.auth import Rules
from edgespec.server.record import Caller, Key, hash_key
from tests.draft_server import QUICK, REMOTE, DraftServer, V, hear, load_letters, until


@pytest.fixture
def server() -> Iterator[DraftServer]:
    opened = DraftServer(load_letters, parallel=4)
    yield opened
    opened.close()


def make_keys(key: str) -> Rules:
    return Rules(lambda: [Key(Caller("box"), hash_key(key))], None)


def test_keys() -> None:
    server = DraftServer(load_letters, rules=make_keys("right"))
    for key, told in (("", "wants a key"), ("wrong", "refuses this key")):
        with pytest.raises(DraftRefused, match=told) as caught:
            server.connect(key=key)
        assert "EDGESPEC_DRAFT_KEY" in caught.value.hint
    remote = server.connect(key="right")
    link = remote.open_link(V, lambda: None)
    assert link.epoch
    remote.close()
    server.close()


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://127.0.0.1:1", "no draft server answers at http://127.0.0.1:1: nobody listens there."),
        ("http://no.such.host.invalid:7438", "no draft server answers at http://no.such.host.invalid:7438: "),
    ],
)
def test_nobody_answers(address: str, told: str) -> None:
    with pytest.raises(DraftRefused) as caught:
        RemoteDraft(parse_address(address))
    assert caught.value.message.startswith(told) and "edgespec draft serve" in caught.value.hint


@pytest.mark.parametrize("text", ["http", "http://", "http:///x", "http://h:99999", "http://h:1/m?q=1", "http://h:x"])
def test_no_address(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the address of a draft server"):
        parse_address(text)


def test_an_address_has_no_key() -> None:
    with pytest.raises(InvalidRequest, match="no place for a key"):
        parse_address("http://user:secret@box:7438")
    assert str(parse_address("https://box")) == "https://box:443"
    assert str(parse_address("http://[::1]:7438/a+b")) == "http://[::1]:7438/a+b"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"<html>hello</html>", "is not `edgespec draft serve`"),
        (b'{"protocol": 999, "model": "x", "tokenizer": "y"}', "speaks version 999 of the protocol"),
        (b"[" * 5000, "is not `edgespec draft serve`"),
    ],
)
def test_another_server_answers(body: bytes, told: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.handle_request).start()
        with pytest.raises(DraftRefused, match=told):
            RemoteDraft(parse_address(f"http://127.0.0.1:{other.server_port}"))


def test_what_speaks_no_http_or_tls(server: DraftServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-x\r\n\r\n")).start()
        with pytest.raises(DraftRefused, match="it does not speak HTTP"):
            RemoteDraft(parse_address(f"http://127.0.0.1:{other.getsockname()[1]}"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=answer_a_part, args=(other,)).start()
        with pytest.raises(DraftRefused, match="it ended the connection"):
            RemoteDraft(parse_address(f"http://127.0.0.1:{other.getsockname()[1]}"))
    with pytest.raises(DraftRefused, match="there is no trusted TLS at https"):
        RemoteDraft(parse_address(server.url.replace("http", "https")))


def answer_a_part(listener: socket.socket) -> None:
    with listener.accept()[0] as channel:
        channel.recv(4096)
        channel.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")


def test_another_name(server: DraftServer) -> None:
    with pytest.raises(DraftRefused, match="serves a draft, not another"):
        RemoteDraft(parse_address(f"{server.url}/another"))
    RemoteDraft(parse_address(f"{server.url}/a%20draft")).close()


def test_another_tokenizer(server: DraftServer) -> None:
    """The engine refuses it, and so does a server that was started again with another draft."""

    class Tokenizer(type(load_letters().tokenizer)):  # type: ignore[misc]
        def special_text(self, token: int) -> str:
            return f"other {token}"

    target = load_letters()
    target.tokenizer = Tokenizer()
    remote = server.connect()
    with pytest.raises(DraftRefused, match=r"the tokenizer of a draft at .* is not the target's"):
        Engine(target, [LoadedDrafter(drafter_specs()["remote"], "remote", remote)], REMOTE)
    server.model.tokenizer = "another one"
    link = remote.open_link(V, lambda: None)
    assert not link.epoch and "the tokenizer of a draft is not the target's" in remote.take_notices()[0]
    remote.close()


def test_a_refusal_is_told_after_a_loss(server: DraftServer) -> None:
    """A server that was started again with another draft is not taken for one that is gone."""
    remote = server.connect()
    link = remote.open_link(V, lambda: None)
    server.model.tokenizer = "another one"
    wrong = Ask(1, Mirror().change_to([1]), 4, 4)
    link.send(wrong, link.epoch + 1)
    time.sleep(0.1)
    assert not remote.take_notices(), "that was for another connection"
    link.send(wrong, link.epoch)
    notices = hear(remote, 2)
    assert "a session starts with a Begin" in notices[0] and "is not the target's" in notices[1]
    remote.close()


def test_a_session_that_is_closed_while_it_is_opened(server: DraftServer) -> None:
    """It gives its connection back at once."""
    remote = server.connect(QUICK)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        remote.address = parse_address(f"http://127.0.0.1:{silent.getsockname()[1]}")
        link = remote.open_link(V, lambda: None)
        channel, _ = silent.accept()
        channel.settimeout(3)
        assert channel.recv(4096).startswith(b"POST /v1/draft?")
        link.close()
        assert channel.recv(4096) == b""
        channel.close()
    remote.close()


def test_one_client_more_than_caches(server: DraftServer) -> None:
    """It drafts without the server until a cache is free."""
    remote = server.connect()
    links = [remote.open_link(V, lambda: None) for _ in range(5)]
    assert [link.epoch for link in links] == [1, 1, 1, 1, 0]
    (notice,) = remote.take_notices()
    assert notice.startswith("The drafter remote ") and "all caches of the draft server are in use" in notice
    links[0].close()
    until(lambda: links[4].epoch > 0)
    assert not remote.take_notices(), "it is said once"
    remote.close()
