"""TextReader on toy sessions: what a session holds is always the text, and little of it is read twice."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.sequence import shared_prefix
from edgespec.backends.toy_session import ToySession
from edgespec.cancel import cancellable
from edgespec.core.decoding import decode_one, score_tokens
from edgespec.core.protocols import Draft
from edgespec.drafters.sequential import TextReader
from edgespec.errors import Cancelled
from tests.core.toys import KINDS, Alarm, open_session
from tests.drafters.sessions import MODEL, TEXT, CountingSession, LateSession, V, decode_greedily, held

ALL = 10**6
_token = st.integers(0, V - 1)


class Model:
    """A TextReader beside what it must hold, written out."""

    def __init__(self, session: ToySession, kind: str) -> None:
        self.session = session
        self.is_recurrent = kind == "recurrent"
        self.reader = TextReader(session)
        self.text: list[int] = []
        self.drafted: list[int] = []  # of them the session may lack the last
        self.is_settled = True  # whether the reader knows them
        self.skipped = 0
        self.has_read = False

    def begin(self, text: list[int]) -> None:
        known = shared_prefix([*self.text, *self.drafted * self.is_settled], text, len(text) - 1)
        before = self.skipped + len(held(self.session))
        self.reader.begin(text)
        if not self.has_read or known <= self.skipped:
            self.skipped, self.has_read = 0, False
        elif not self.is_recurrent:
            assert self.skipped + len(held(self.session)) == min(known, before), "what agrees is kept"
        self.text, self.drafted = text[: self.skipped + len(held(self.session))], []  # what is known to be held

    def check_unread(self, text: list[int]) -> None:
        """`text` has gone on."""
        known = shared_prefix([*self.text, *self.drafted], text, len(text) - 1)
        before = self.skipped + len(held(self.session))
        unread = self.reader.pending_tokens(text)
        self.is_settled = True
        cache = held(self.session)
        if not self.has_read:
            assert unread == len(text)
            return
        assert cache == text[self.skipped : self.skipped + len(cache)]
        assert unread == len(text) - self.skipped - len(cache) >= 1
        if not self.is_recurrent:
            assert self.skipped + len(cache) == min(known, before), "what agrees is kept"

    def read(self, text: list[int], window: int, rows: int) -> bool:
        size = self.session.capabilities.context_size
        window = max(1, min(window, size // 2))
        unread = self.reader.pending_tokens(text)
        rest = self.reader.prepare(text, window, rows)
        if unread > window or len(text) + rows - self.skipped > size:
            self.skipped, self.has_read = len(text) - min(window, len(text)), False
        if rest is None:
            assert max(text[self.skipped :]) >= V
            return False
        assert [*held(self.session), *rest] == text[self.skipped :]
        assert len(rest) == 1 or len(rest) - 1 + rows <= self.session.draft_limit
        self.text, self.drafted, self.has_read, self.is_settled = list(text), [], True, True
        assert list(self.reader.text) == text
        return True

    def draft(self, n: int, *, unread: bool) -> None:
        """After `read`: token by token, or as a chain that the host has not read."""
        size = self.session.capabilities.context_size
        rest = self.text[self.skipped + len(held(self.session)) :]
        if unread:
            n = min(n, size - self.session.position - len(rest) + 1)
            self.drafted, self.is_settled = decode_greedily(self.session, rest, n, V), False
            self.reader._chain = Draft.chain(self.drafted)
            return
        token = int(score_tokens(self.session, rest).argmax())
        while len(self.drafted) < n and self.session.position < size:
            logits = decode_one(self.session, token)
            self.reader.text.append(token)
            self.drafted.append(token)
            token = int(logits.argmax())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=70, deadline=None)
def test_the_session_holds_the_text(kind: str, data: st.DataObject) -> None:
    """After any generations, rounds, windows, drafts and verdicts."""
    size = data.draw(st.sampled_from([1, 2, 3, 8, 12, 20, 256]))
    model = Model(open_session(kind, MODEL, size), kind)
    text: list[int] = []
    for _ in range(data.draw(st.integers(1, 3))):
        kept = data.draw(st.integers(0, len(text)))
        text = [*text[:kept], *data.draw(st.lists(_token, min_size=1, max_size=12))]
        model.begin(text)
        text = [*text, data.draw(_token)]
        for _ in range(data.draw(st.integers(0, 5))):
            if data.draw(st.booleans()):
                model.check_unread(text)
            window, rows = data.draw(st.sampled_from([1, 3, 6, ALL])), data.draw(st.sampled_from([0, 0, 2]))
            if data.draw(st.booleans()) and model.read(text, window, rows):
                model.draft(data.draw(st.integers(1, 6)), unread=data.draw(st.booleans()))
            agreed = data.draw(st.integers(0, len(model.drafted)))
            text = [*text, *model.drafted[:agreed], *data.draw(st.lists(_token, min_size=1, max_size=3))]
            if data.draw(st.booleans()):
                model.reader.settle(text)
                model.is_settled = True


def read(reader: TextReader, text: list[int], window: int = ALL) -> list[int]:
    """What a forward has to read."""
    rest = reader.prepare(text, window)
    assert rest is not None
    score_tokens(reader.session, rest)
    return rest


def test_more_unread_tokens_than_a_forward_takes_are_prefilled() -> None:
    session = CountingSession(most=1)
    reader = TextReader(session)
    reader.begin(TEXT[:-1])
    read(reader, TEXT)
    assert read(reader, [*TEXT, 3, 1, 4, 1, 5]) == [5]
    assert session.prefills == [[4, 8, 9], [14]], "and not the whole text again"


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_only_the_end_of_a_text_longer_than_the_window_is_read(kind: str) -> None:
    session = open_session(kind, MODEL)
    reader = TextReader(session)
    reader.begin(TEXT[:-1])
    text = list(TEXT)
    for more, count in (([], 4), ([1, 1], 6), ([2, 3, 4, 5], 10), ([2, 3, 4, 5, 6], 4)):  # at last too far behind
        text += more
        read(reader, text, 4)
        assert held(session) == text[-count:]
    reader.begin(text)
    assert reader.pending_tokens([*text, 1]) == (2 if kind == "linear" else 5), "a window is kept too"
    reader.begin(text[:3])
    assert reader.pending_tokens(text[:3]) == 3


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_tokens_that_the_draft_lacks(kind: str) -> None:
    """None while such a token would have to be read; it goes on where the window no longer reaches it."""
    reader = TextReader(open_session(kind, MODEL))
    text = [1, 9, 2, 3, 4, 5]
    reader.begin(text)
    assert reader.prepare(text, ALL) is None
    assert read(reader, text, 4) and held(reader.session) == text[-4:]
    text += [6, V, 7]  # the first id that the draft lacks
    assert reader.prepare(text, 4) is None
    assert read(reader, [*text, 1, 2], 3) and held(reader.session) == [7, 1, 2]


@pytest.mark.parametrize("calls", (1, 2, 4, 7))
@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_cancelled_between_operations(kind: str, calls: int) -> None:
    alarm = Alarm(calls)
    session = open_session(kind, MODEL)
    reader = TextReader(session)
    text = list(TEXT)
    reader.begin(text[:-1])
    with suppress(Cancelled), cancellable(alarm):
        for token in np.random.default_rng(calls).integers(0, V, 6).tolist():
            read(reader, text)
            text.append(token)
    for following in ([*text, 3], [*text, 3, 1]):
        reader.begin(following[:-1])
        read(reader, following)
        assert held(session) == following


@pytest.mark.parametrize("at", [1, 2])
def test_cancelled_while_scores_are_waited_for(at: int) -> None:
    """The forward is still pending when the next generation continues the text."""
    session = LateSession()
    session.cancelled = at
    reader = TextReader(session)
    reader.begin(TEXT[:-1])
    with pytest.raises(Cancelled):
        read(reader, TEXT)
        read(reader, [*TEXT, 1])
    text = [*TEXT, 1, 2, 3]
    reader.begin(text[:-1])
    read(reader, text)
    assert held(session) == text
