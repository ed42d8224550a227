"""What the engine process sends, and when."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from edgespec.service import process_main
from edgespec.service.link import Update
from edgespec.service.process_main import Outbox
from edgespec.text.stream import Piece


class Sent:
    """An outbox at a time that the test sets, and what has arrived from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1.0
        self._ours, self._theirs = Pipe()
        monkeypatch.setattr(process_main, "perf_counter", lambda: self.now_s)
        self.outbox = Outbox(self._theirs)

    def put(self, *events: object, number: int = 0) -> None:
        for event in events:
            self.outbox.put(number, [event], takes_turns=True)

    def turn(self, seconds: float) -> None:
        """A forward has taken so long."""
        self.now_s += seconds
        self.outbox.flush_after_turn()

    def messages(self) -> list[Update]:
        return list(_receive(self._ours))


def _receive(link: Connection) -> Iterator[Update]:
    while link.poll(0):
        message = link.recv()
        assert isinstance(message, Update)
        yield message


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


def test_where_forwards_are_slow_no_event_waits_for_the_next_one(sent: Sent) -> None:
    for i in range(3):
        sent.now_s += 0.04
        sent.put(f"step {i}", f"piece {i}", f"another {i}")
        sent.turn(0)
        arrived = [event for message in sent.messages() for event in message.events[0]]
        assert arrived == [f"step {i}", f"piece {i}", f"another {i}"]


def test_where_turns_are_fast_the_events_of_all_streams_are_one_message(sent: Sent) -> None:
    sent.put("first")
    sent.turn(0.001)
    assert len(sent.messages()) == 1
    for i in range(4):
        sent.put(i)
        sent.put(-i, number=1)
        sent.turn(0.002)
        assert not sent.messages()
    sent.put(4)
    sent.turn(0.0021)
    assert sent.messages() == [Update({0: [0, 1, 2, 3, 4], 1: [0, -1, -2, -3]})]
    sent.put(5)
    sent.outbox.end(0, None, None)
    (last,) = sent.messages()
    assert last == Update({0: [5]}, 0), "none is lost"


def test_the_first_text_of_a_stream_waits_for_nothing(sent: Sent) -> None:
    sent.turn(0.001)
    for number in (0, 1):
        sent.messages()
        sent.put(Piece("a", "answer", ""), number=number)
        sent.turn(0.001)
        assert sent.messages() == [Update({number: [("a", "answer", "")]})]
        sent.put(Piece("b", "answer", ""), number=number)
        sent.turn(0.001)
        assert not sent.messages(), "later text waits for a few milliseconds"
        sent.turn(0.01)


def test_what_takes_no_turns_is_sent_at_once(sent: Sent) -> None:
    sent.turn(0.001)
    sent.messages()
    sent.outbox.put(0, ["downloaded"], takes_turns=False)
    assert sent.messages() == [Update({0: ["downloaded"]})]
