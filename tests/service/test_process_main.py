"""What the engine process sends, and when."""

from __future__ import annotations

from multiprocessing import Pipe

from edgespec.service.messages import Events
from edgespec.service.process_main import _Outbox


def received(link: object) -> list[object]:
    found: list[object] = []
    while link.poll(0):  # type: ignore[attr-defined]
        message = link.recv()  # type: ignore[attr-defined]
        assert isinstance(message, Events)
        found += message.events
    return found


def test_where_forwards_are_slow_no_event_waits_for_the_next_one() -> None:
    ours, theirs = Pipe()
    outbox = _Outbox(theirs)
    outbox.put(0, "step")
    outbox.put(0, "piece")
    assert received(ours) == ["step", "piece"]


def test_where_turns_are_fast_events_are_sent_together_and_none_is_lost() -> None:
    ours, theirs = Pipe()
    outbox = _Outbox(theirs)
    outbox.flush_after_turn()
    outbox.flush_after_turn()  # at once: decoding is fast
    for i in range(50):
        outbox.put(0, i)
    early = received(ours)
    assert len(early) < 50
    outbox.end(0, None, None)
    assert early + received(ours) == list(range(50))
