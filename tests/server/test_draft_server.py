"""A draft server over real sockets: who may use it, what it survives, and what its clients do without it."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy.model import LetterModel, ToyRuntimeModel
from edgespec.core.arrays import Logits
from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import NO_DRAFT, Budget, Round, Step
from edgespec.core.sampling import SamplingParams
from edgespec.drafters import drafter_specs
from edgespec.drafters.remote.draft import RemoteDraft, parse_address
from edgespec.drafters.remote.drafter import RemoteDrafter
from edgespec.drafters.remote.link import Patience
from edgespec.drafters.remote.messages import Ask, Begin, Change, Drafted, Message, Mirror, encode, split
from edgespec.engine.drafting import LoadedDrafter, Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Notice, Request
from edgespec.errors import DraftRefused, InvalidRequest
from edgespec.server.draft_guesses import AcceptanceRate, list_path, rank_guesses
from edgespec.server.guard import Rules
from edgespec.server.keys import Caller, Key, Keys, hash_key
from tests.draft_server import DraftServer

V = 257
PROMPT = [*b"the rain in"]
QUICK = Patience(least_s=0.05, most_s=0.05)
REMOTE = Speculation(("remote",), 3)


def load(noise: float = 1.0) -> ToyRuntimeModel:
    return ToyRuntimeModel("tree", LetterModel(noise=noise), LoadOptions(context_size=256))


@pytest.fixture
def server() -> Iterator[DraftServer]:
    opened = DraftServer(load, parallel=4)
    yield opened
    opened.close()


def open_engine(remote: RemoteDraft) -> Engine:
    target = ToyRuntimeModel("tree", LetterModel(), LoadOptions(context_size=256))
    return Engine(target, [LoadedDrafter(drafter_specs()["remote"], "remote", remote)], REMOTE)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within 20 seconds")


def hear(remote: RemoteDraft, n: int) -> list[str]:
    """The next `n` notices."""
    heard: list[str] = []

    def listen() -> bool:
        heard.extend(remote.take_notices())
        return len(heard) >= n

    until(listen)
    return heard


def make_keys(key: str) -> Rules:
    return Rules(Keys(lambda: [Key(Caller("box"), hash_key(key))]), None)


def test_keys() -> None:
    server = DraftServer(load, rules=make_keys("right"))
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

    class Tokenizer(type(load().tokenizer)):  # type: ignore[misc]
        def special_text(self, token: int) -> str:
            return f"other {token}"

    target = load()
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
    assert notice.startswith("The drafter remote ") and "all 4 caches of the draft server are in use" in notice
    links[0].close()
    until(lambda: links[4].epoch > 0)
    assert not remote.take_notices(), "it is said once"
    remote.close()


def open_session(server: DraftServer) -> tuple[http.client.HTTPConnection, socket.socket]:
    """A session of a client that is not ours, and its socket."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    path = f"/v1/draft?protocol=1&tokenizer={server.model.tokenizer}&vocab_size={V}&guesses=2"
    connection.putrequest("POST", path)
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    return connection, connection.sock


def send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(b"%x\r\n%b\r\n" % (len(data), data))


def receive(channel: socket.socket, n: int) -> list[Message]:
    """The first `n` messages."""
    response = http.client.HTTPResponse(channel, method="POST")
    response.begin()
    assert response.status == 200, response.read()
    received = bytearray()
    found: list[Message] = []
    while len(found) < n and (data := response.read1(2**16)):
        received += data
        found += split(received)
    return found


def begin(text: Sequence[int]) -> Begin:
    return Begin(1, Mirror().change_to(text), None, 0)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (struct.pack("<IB", 0, 1), "a message of 0 bytes is not allowed"),
        (struct.pack("<IB", 2**31, 1), "a message of 2,147,483,648 bytes is not allowed"),
        (struct.pack("<IB", 1, 99), "there are no messages of kind 99"),
        (struct.pack("<IB", 1, 1), "a message of kind 1 is malformed"),
        (struct.pack("<IB", 3, 2) + b"xx", "a message of kind 2 is malformed"),
        (encode(Begin(1, Change(3, [1], 0), None, 0)), "it keeps 3 tokens of a text of 0"),
        (encode(Begin(1, Change(0, [1], 5), None, 0)), "the two sides hold different texts"),
        (encode(begin([V])), "the ids of tokens are 0 to 256"),
        (encode(begin([-1])), "the ids of tokens are 0 to 256"),
        (encode(begin([])), "the text is empty"),
        (encode(Ask(1, Mirror().change_to([1]), 4, 4)), "a session starts with a Begin"),
        (encode(Drafted(1, (), (), (), ())), "a session starts with a Begin"),
        (encode(begin([1])).replace(b"\0\0\0\0\1\0\0\0", b"\5\0\0\0\1\0\0\0"), "malformed"),
    ],
)
def test_malformed_messages(server: DraftServer, data: bytes, told: str) -> None:
    connection, channel = open_session(server)
    send(channel, data)
    (fault,) = receive(channel, 1)
    assert told in str(fault)
    connection.close()
    until(lambda: server.model.describe()["in_use"] == 0)
    remote = server.connect()
    assert remote.open_link(V, lambda: None).epoch, "others are served"
    remote.close()


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 409),
        ("?protocol=2", 409),
        ("?protocol=1&tokenizer=x&vocab_size=257", 409),
        ("?protocol=1&tokenizer={t}&vocab_size=-1&guesses=1", 400),
        ("?protocol=1&tokenizer={t}&vocab_size=257", 400),
        ("?protocol=1&tokenizer={t}&vocab_size=99999999999999&guesses=1", 400),
    ],
)
def test_sessions_that_are_refused(server: DraftServer, query: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("POST", f"/v1/draft{query.format(t=server.model.tokenizer)}", body=b"")
    response = connection.getresponse()
    assert (response.status, b"error" in response.read()) == (status, True)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 404
    connection.close()


def test_what_is_guessed_is_sent_before_it_is_asked_for(server: DraftServer) -> None:
    connection, channel = open_session(server)
    send(channel, encode(begin(PROMPT)))
    first = receive(channel, 1)[0]
    assert isinstance(first, Drafted) and first.is_guess and first.number == 1
    assert len(first.emitted) == 1 and first.depth == 4
    connection.close()


def test_a_text_longer_than_the_draft_reads_its_end() -> None:
    server = DraftServer(lambda: ToyRuntimeModel("tree", LetterModel(), LoadOptions(context_size=32)))
    remote = server.connect()
    drafter = RemoteDrafter(remote.open_link(V, lambda: None), V)
    text = PROMPT * 20
    drafter.begin(text[:-1], None)
    tree = DraftTree()
    assert sum(1 for _ in drafter.expand(tree, text, Budget(3, 3))) == 1 and tree.depths[-1] == 3
    drafter.close()
    remote.close()
    server.close()


@dataclass(frozen=True)
class Slow(LetterModel):
    """Computes until `gate` is set."""

    gate: threading.Event = field(default_factory=threading.Event)

    def logits(self, prefix: Sequence[int]) -> Logits:
        self.gate.wait(20)
        return super().logits(prefix)


def test_nobody_waits_long_for_a_slow_server() -> None:
    """The first wait is a unit without proposals; until its reply comes there are none."""
    model = Slow()
    server = DraftServer(lambda: ToyRuntimeModel("linear", model, LoadOptions(context_size=256)))
    remote = server.connect(QUICK)
    drafter = RemoteDrafter(remote.open_link(V, lambda: None), V)
    drafter.begin(PROMPT, None)
    tree, text = DraftTree(), [*PROMPT, 32]
    assert [sum(1 for _ in drafter.expand(tree, text, Budget(3, 3))) for _ in range(3)] == [1, 0, 0] and not len(tree)
    model.gate.set()

    def drafts_again() -> bool:
        text.append(101)
        drafter.observe(Round(text, (101,), NO_DRAFT, (), 0, None))
        return bool(sum(1 for _ in drafter.expand(tree, text, Budget(3, 3))) and len(tree))

    until(drafts_again)
    drafter.close()
    remote.close()
    server.close()


def test_a_server_that_owes_a_reply_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.drafters.remote.link._STALL_S", 1.0)
    model = Slow()
    server = DraftServer(lambda: ToyRuntimeModel("linear", model, LoadOptions(context_size=256)))
    remote = server.connect(QUICK)
    drafter = RemoteDrafter(remote.open_link(V, lambda: None), V)
    drafter.begin(PROMPT, None)
    assert sum(1 for _ in drafter.expand(DraftTree(), [*PROMPT, 32], Budget(3, 3))) == 1
    (notice,) = hear(remote, 1)
    model.gate.set()
    assert "no reply has come for 1 seconds" in notice
    drafter.close()
    remote.close()
    server.close()


def answer(engine: Engine, spec: Speculation, n: int = 60) -> Finished:
    engine.speculation = spec
    *_, finished = engine.stream(Request("the rain in", SamplingParams(temperature=0), n))
    assert isinstance(finished, Finished)
    return finished


def test_a_server_that_is_lost_and_comes_back_within_an_answer() -> None:
    server = DraftServer(load)
    remote = server.connect()
    engine = open_engine(remote)
    wanted = answer(engine, Speculation(), 200).tokens
    engine.speculation = REMOTE
    events = engine.stream(Request("the rain in", SamplingParams(temperature=0), 200))
    steps: list[Step] = []
    notices: list[str] = []

    def run(is_done: Callable[[], bool]) -> None:
        for event in events:
            if isinstance(event, Notice):
                notices.append(event.text)
            elif isinstance(event, Finished):
                assert event.tokens == wanted
            elif isinstance(event, Step):
                steps.append(event)
                if is_done():
                    return

    run(lambda: len(steps) == 5)
    assert any(step.n_drafted for step in steps)
    server.close()
    run(lambda: len(steps) == 15)
    assert not any(step.n_drafted for step in steps[7:]), "plainly meanwhile"
    again = DraftServer(load, port=server.port)

    def is_back() -> bool:
        time.sleep(0.05)
        return steps[-1].n_drafted > 0

    run(is_back)
    assert steps[-1].n_drafted, "it is used again"
    run(lambda: False)
    (notice,) = notices
    assert notice.startswith(f"The drafter remote has no connection to {server.url}: ")
    engine.release_draft()
    again.close()


@pytest.mark.parametrize("guesses", [0, 1, 6])
def test_texts_are_those_of_plain_decoding(guesses: int) -> None:
    """With a draft that is right at every token, and one that is not."""
    for noise in (0.0, 1.0):
        server = DraftServer(lambda noise=noise: load(noise))  # type: ignore[misc]
        engine = open_engine(server.connect(guesses=guesses))
        plain, drafted = answer(engine, Speculation()), answer(engine, REMOTE)
        assert drafted.tokens == plain.tokens
        assert drafted.metrics.accepted_tokens > (40 if noise == 0 else 5)
        engine.release_draft()
        server.close()


def test_guesses_are_ranked_by_what_was_accepted() -> None:
    draft = Drafted(1, (), [1, 2, 3, 4], [-1, -1, 0, 0], [0.5, 0.25, 0.5, 0.25])
    path, after = list_path(draft), [(7, 0.5), (8, 0.25)]
    assert path == [0, 2]
    sure, unsure = rank_guesses(draft, path, after, 0.9), rank_guesses(draft, path, after, 0.2)
    assert sure[0] == (1, 3, 7) and unsure[:2] == [(2,), (1, 4)]
    rate = AcceptanceRate()
    before = rate.value
    rate.observe(draft, [1, 3, 7])
    assert rate.value > before
    for _ in range(50):
        rate.observe(draft, [2])
    assert rate.value < 0.3
