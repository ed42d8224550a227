"""Clients of a draft server: who is refused, and what answers do with a slow server, and without one that is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import LetterModel, ToyRuntimeModel
from edgespec.core.protocols import NO_DRAFT, Budget, Round, Step
from edgespec.core.sampling import Logits, SamplingParams
from edgespec.core.tree import DraftTree
from edgespec.drafters import drafter_specs
from edgespec.drafters.remote import RemoteDraft, RemoteDrafter, parse_address
from edgespec.engine.drafting import LoadedDrafter, Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Notice, Request
from edgespec.errors import Cancelled, DraftRefused, InvalidRequest
from edgespec.server.auth import Rules
from edgespec.server.record import Caller, hash_key
from tests.draft_server import PROMPT, QUICK, REMOTE, DraftServer, V, hear, load_letters, open_engine, until


@pytest.fixture
def server() -> Iterator[DraftServer]:
    opened = DraftServer(load_letters, parallel=4)
    yield opened
    opened.close()


def make_keys(key: str) -> Rules:
    return Rules(lambda: {hash_key(key): Caller("box")}, None)


def draft_once(drafter: RemoteDrafter, text: Sequence[int] = PROMPT) -> tuple[int, int]:
    """(units, tokens)"""
    tree = DraftTree()
    return sum(1 for _ in drafter.expand(tree, text, Budget(3, 3))), len(tree)


def test_keys() -> None:
    server = DraftServer(load_letters, rules=make_keys("right"))
    for key, told in (("", "wants a key"), ("wrong", "refuses this key")):
        with pytest.raises(DraftRefused, match=told) as caught:
            server.connect(key=key)
        assert "EDGESPEC_DRAFT_KEY" in caught.value.hint
    drafter = RemoteDrafter(server.connect(key="right").open_link(V, lambda: None), V)
    assert draft_once(drafter)[1]
    drafter.close()
    server.close()


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://127.0.0.1:1", "no draft server answers at http://127.0.0.1:1: Connection refused."),
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
    for said in (b"SSH-2.0-x\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"):
        with socket.create_server(("127.0.0.1", 0)) as other:
            threading.Thread(target=answer_and_close, args=(other, said)).start()
            with pytest.raises(DraftRefused, match=r"no draft server answers at |is not `edgespec draft serve`"):
                RemoteDraft(parse_address(f"http://127.0.0.1:{other.getsockname()[1]}"))
    with pytest.raises(DraftRefused, match=r"no draft server answers at https://.*SSL"):
        RemoteDraft(parse_address(server.url.replace("http", "https")))


def answer_and_close(listener: socket.socket, said: bytes) -> None:
    with listener.accept()[0] as channel:
        channel.recv(4096)
        channel.sendall(said)


def test_another_name(server: DraftServer) -> None:
    with pytest.raises(DraftRefused, match="serves a draft, not another"):
        RemoteDraft(parse_address(f"{server.url}/another"))
    assert RemoteDraft(parse_address(f"{server.url}/a%20draft")).model == "a draft"


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
    drafter = RemoteDrafter(remote.open_link(V, lambda: None), V)
    assert draft_once(drafter)[1]
    server.model.tokenizer = "another one"
    assert draft_once(drafter) == (1, 0)
    (notice,) = remote.take_notices()
    assert "the tokenizer of a draft is not the target's" in notice
    drafter.close()


def test_more_clients_than_caches(server: DraftServer) -> None:
    """Each draws on a cache in its turn, and sends its text again where it was lost."""
    drafters = [server.open_drafter() for _ in range(5)]
    for text in (PROMPT, [*PROMPT, 32], [*PROMPT, 32, 101]):
        assert all(draft_once(drafter, text)[1] for drafter in drafters)
    assert server.model.describe()["in_use"] == 4
    for drafter in drafters:
        drafter.close()


@dataclass(frozen=True)
class Slow(LetterModel):
    """Computes until `gate` is set."""

    gate: threading.Event = field(default_factory=threading.Event)

    def logits(self, prefix: Sequence[int]) -> Logits:
        self.gate.wait(20)
        return super().logits(prefix)


def serve_slowly() -> tuple[DraftServer, Slow]:
    model = Slow()
    return DraftServer(lambda: ToyRuntimeModel("linear", model, LoadOptions(context_size=256))), model


def test_nobody_waits_long_for_a_slow_server() -> None:
    """The first wait is a unit without proposals; until its answer comes there are none."""
    server, model = serve_slowly()
    drafter, text = server.open_drafter(QUICK), [*PROMPT, 32]
    assert [draft_once(drafter, text) for _ in range(3)] == [(1, 0), (0, 0), (0, 0)]
    model.gate.set()

    def drafts_again() -> bool:
        text.append(101)
        drafter.observe(Round(text, (101,), NO_DRAFT, (), 0, None))
        return draft_once(drafter, text)[1] > 0

    until(drafts_again)
    drafter.close()
    server.close()


def test_a_wait_can_be_cancelled_and_a_request_ended() -> None:
    server, model = serve_slowly()
    is_cancelled = threading.Event()

    def check() -> None:
        if is_cancelled.is_set():
            raise Cancelled

    drafter = RemoteDrafter(server.connect().open_link(V, check), V)
    threading.Timer(0.2, is_cancelled.set).start()
    started = time.perf_counter()
    with pytest.raises(Cancelled):
        draft_once(drafter)
    asked = drafter._asked
    drafter.close()
    assert asked is not None and asked.result(10) is None and time.perf_counter() - started < 15
    model.gate.set()
    server.close()


def test_a_server_that_owes_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.drafters.remote._REPLY_S", 0.5)
    server, model = serve_slowly()
    remote = server.connect(QUICK)
    drafter = RemoteDrafter(remote.open_link(V, lambda: None), V)
    assert draft_once(drafter) == (1, 0)
    (notice,) = hear(remote, 1)
    model.gate.set()
    assert f"has no drafts of {server.url}: timed out" in notice
    until(lambda: draft_once(drafter)[1] > 0)
    assert not remote.take_notices(), "it is said once"
    drafter.close()
    server.close()


def answer(engine: Engine, spec: Speculation, n: int = 60) -> Finished:
    engine.speculation = spec
    *_, finished = engine.stream(Request("the rain in", SamplingParams(temperature=0), n))
    assert isinstance(finished, Finished)
    return finished


def test_a_server_that_is_lost_and_comes_back_within_an_answer() -> None:
    server = DraftServer(load_letters)
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
    again = DraftServer(load_letters, port=server.port)

    def is_back() -> bool:
        time.sleep(0.05)
        return steps[-1].n_drafted > 0

    run(is_back)
    assert steps[-1].n_drafted, "it is used again"
    run(lambda: False)
    (notice,) = notices
    assert notice.startswith(f"The drafter remote has no drafts of {server.url}: ")
    engine.release_draft()
    again.close()


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(noise: float) -> None:
    """With a draft that is right at every token, and one that is not."""
    server = DraftServer(lambda: load_letters(noise))
    engine = open_engine(server.connect())
    plain, drafted = answer(engine, Speculation()), answer(engine, REMOTE)
    assert drafted.tokens == plain.tokens
    assert drafted.metrics.accepted_tokens > (40 if noise == 0 else 5)
    engine.release_draft()
    server.close()
