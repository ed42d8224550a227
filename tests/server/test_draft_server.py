"""A draft server over real sockets: sessions of clients that are not ours, and what is guessed."""

from __future__ import annotations

import http.client
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import LetterModel, ToyRuntimeModel
from edgespec.core.protocols import NO_DRAFT, Budget, Round
from edgespec.core.sampling import Logits, Sampler, SamplingParams
from edgespec.core.tree import DraftTree
from edgespec.drafters.remote.drafter import RemoteDrafter
from edgespec.drafters.remote.link import Mirror
from edgespec.drafters.remote.messages import Ask, Begin, Change, Drafted, Message, encode, measure_path, split
from edgespec.drafters.sequential import RequestDraw
from edgespec.server.draft import AcceptanceRate, list_path, rank_guesses
from tests.draft_server import PROMPT, DraftServer, V, load_letters, until


@pytest.fixture
def server() -> Iterator[DraftServer]:
    opened = DraftServer(load_letters, parallel=4)
    yield opened
    opened.close()


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


def receive(channel: socket.socket, is_enough: Callable[[list[Drafted]], bool]) -> list[Drafted]:
    """The drafts up to the first one with which there are enough."""
    found: list[Drafted] = []
    for message in receive_all(channel):
        assert isinstance(message, Drafted)
        found.append(message)
        if is_enough(found):
            break
    return found


def receive_all(channel: socket.socket) -> Iterator[Message]:
    response = http.client.HTTPResponse(channel, method="POST")
    response.begin()
    assert response.status == 200, response.read()
    received = bytearray()
    while data := response.read1(2**16):
        received += data
        yield from split(received)


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
    fault = next(receive_all(channel))
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
    first = receive(channel, lambda found: True)[0]
    assert first.is_guess and first.number == 1
    assert len(first.emitted) == 1 and measure_path(first.parents, first.confidences)[0] == 4
    connection.close()


def test_an_ask_of_depth_zero_is_answered_by_a_guess(server: DraftServer) -> None:
    connection, channel = open_session(server)
    mirror = Mirror()
    send(channel, encode(Begin(1, mirror.change_to(PROMPT), None, 0)))
    send(channel, encode(Ask(2, mirror.change_to([*PROMPT, 97]), 0, 0)))
    last = receive(channel, lambda found: found[-1].number == 2)[-1]
    assert last.is_guess and not last.emitted and measure_path(last.parents, last.confidences)[0] == 1
    connection.close()


def test_what_is_guessed_of_drawn_tokens_is_as_long_as_wanted(server: DraftServer) -> None:
    """Also after a generation of best tokens, whose paths end where they are improbable."""
    connection, channel = open_session(server)
    mirror, sampling = Mirror(), SamplingParams(temperature=1.5)
    send(channel, encode(Begin(1, mirror.change_to(PROMPT), None, 0)))
    send(channel, encode(Ask(2, mirror.change_to([*PROMPT, 97]), 8, 8, 0.99)))
    send(channel, encode(Begin(3, mirror.change_to(PROMPT), sampling, 1)))
    found = receive(channel, lambda found: [each.number for each in found].count(3) == 2)
    assert [measure_path(each.parents, each.confidences)[0] for each in found if each.number == 3] == [8, 8]
    assert [measure_path(each.parents, each.confidences)[0] for each in found if not each.is_guess] == [1]
    connection.close()


def test_a_path_ends_where_it_is_improbable(server: DraftServer) -> None:
    remote = server.connect(guesses=0)
    drafter, text = RemoteDrafter(remote.open_link(V, lambda: None), V), [*PROMPT, 32]
    paths = {}
    for reach in (0.0, 0.3):
        tree = DraftTree()
        drafter.begin(PROMPT, None)
        list(drafter.expand(tree, text, Budget(8, 8, reach=reach)))
        depth, probability = measure_path(tree.parents, [votes["remote"] for votes in tree.votes])
        paths[reach] = probability, depth
    (least, whole), (least_cut, cut) = paths.values()
    assert whole == 8 and least < 0.3
    assert 0 < cut < whole and least_cut < 0.3
    tree = DraftTree()
    drafter.begin(PROMPT, RequestDraw(Sampler(SamplingParams(temperature=1.5), V), np.random.default_rng(0)))
    list(drafter.expand(tree, text, Budget(8, 8, reach=0.3)))
    assert max(tree.depths) == 8, "how many tokens are drawn must not depend on them"
    drafter.close()
    remote.close()


def test_a_draft_is_enough_that_is_deep_or_ends_for_a_reason() -> None:
    chain = Drafted(1, (), [1, 2, 3], [-1, 0, 1], [0.9, 0.5, 0.1])
    assert chain.is_enough(3, 0.0) and not chain.is_enough(4, 0.0) and not chain.is_enough(4, 0.04)
    assert chain.is_enough(4, 0.05)
    assert not Drafted(1, (), (), (), ()).is_enough(1, 1.0)


@dataclass(frozen=True)
class Reading(LetterModel):
    """Keeps the length of the longest text that it was asked about."""

    longest: list[int] = field(default_factory=lambda: [0])

    def logits(self, prefix: Sequence[int]) -> Logits:
        self.longest[0] = max(self.longest[0], len(prefix))
        return super().logits(prefix)


def test_the_server_reads_the_text_while_nobody_asks() -> None:
    """So that the next draft does not wait until a long text is read."""
    model = Reading()
    server = DraftServer(lambda: ToyRuntimeModel("tree", model, LoadOptions(context_size=256)))
    remote = server.connect()
    drafter = RemoteDrafter(remote.open_link(V, lambda: None), V)
    text = [*PROMPT, 97]
    drafter.begin(text, None)

    def has_read() -> bool:
        text.append(97)
        drafter.observe(Round(text, (97,), NO_DRAFT, (), 0, None))
        return model.longest[0] > len(PROMPT) + 90

    until(has_read)
    drafter.close()
    remote.close()
    server.close()


def test_the_server_reads_the_prompt_while_the_target_does() -> None:
    model = Reading()
    server = DraftServer(lambda: ToyRuntimeModel("tree", model, LoadOptions(context_size=256)))
    remote = server.connect()
    drafter = RemoteDrafter(remote.open_link(V, lambda: None), V)
    text = PROMPT * 9
    drafter.prefill_started(text, None)
    until(lambda: model.longest[0] >= len(text))
    drafter.begin(text, None)
    assert drafter._number == 1, "the text was sent once, so what is guessed after it counts"
    drafter.begin(text[:-1], None)
    assert drafter._number == 2
    drafter.close()
    remote.close()
    server.close()


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
