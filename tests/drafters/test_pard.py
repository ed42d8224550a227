"""PardSession on toy sessions: rows of a block see mask tokens, of which the cache keeps nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafters.pard import PardSession
from tests.core.toys import KINDS, open_session
from tests.drafters.sessions import MODEL, TEXT, CountingSession, V, held

MASK = 7
ALL = 10**6


def expected(text: list[int], n: int, vocab_size: int = V) -> list[list[float]]:
    """What the model says after the text and 0, 1, ... mask tokens."""
    rows = [MODEL.logits([*text, *[MASK] * i]).tolist() for i in range(n)]
    return [(row + [-np.inf] * vocab_size)[:vocab_size] for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_as_if_the_masks_had_never_been_there(kind: str, data: st.DataObject) -> None:
    """Blocks of any size after any verdict: rows follow the text, and the cache holds the text alone."""
    token = st.integers(0, V - 1)
    size = data.draw(st.sampled_from([8, 14, 30, 256]))
    session = open_session(kind, MODEL, size)
    pard = PardSession(session, V, MASK)
    text = data.draw(st.lists(token, min_size=2, max_size=12))
    pard.begin(text[:-1])
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            assert 1 <= pard.pending_tokens(text) <= len(text)
        n, window = data.draw(st.integers(1, pard.block_size)), data.draw(st.sampled_from([4, 6, ALL]))
        rows = pard.block(text, window, n)
        assert rows is not None
        assert 1 <= len(rows) <= n
        assert len(rows) == n or session.position + len(rows) - 1 == size, "as many as the context takes"
        cache = held(session)
        assert cache == text[-len(cache) :]
        assert [row.tolist() for row in rows] == expected(text, len(rows))
        drafted = [int(row.argmax()) for row in rows]
        text = [*text, *drafted[: data.draw(st.integers(0, len(drafted)))], data.draw(token)]
        if data.draw(st.booleans()):
            pard.pending_tokens(text)


def test_a_block_is_one_forward_with_all_that_is_unread() -> None:
    session = CountingSession()
    pard = PardSession(session, V, MASK)
    pard.begin(TEXT[:-1])
    pard.block(TEXT, ALL, 4)
    text = [*TEXT, 5, 6, 0]
    assert pard.pending_tokens(text) == 3
    pard.block(text, ALL, 6)
    assert session.prefills == [[4, 8, 9]], "the text before the root is read once"
    assert session.rows == [1 + 3, 3 + 5]
    pard.begin([*text, 1])
    assert pard.pending_tokens([*text, 1, 2]) == 2


@pytest.mark.parametrize("vocab_size", [6, 8, 11])
def test_rows_have_the_targets_ids(vocab_size: int) -> None:
    pard = PardSession(CountingSession(), vocab_size, MASK)
    pard.begin(TEXT[:4])
    rows = pard.block(TEXT[:5], ALL, 3)
    assert rows is not None and [row.tolist() for row in rows] == expected(TEXT[:5], 3, vocab_size)


def test_tokens_that_the_model_lacks() -> None:
    pard = PardSession(CountingSession(), 11, MASK)
    pard.begin([1, 9])
    assert pard.block([1, 9, 2], ALL, 3) is None
    assert pard.block([1, 9, 2, 3], 2, 3) is not None


@pytest.mark.parametrize("mask", [-1, V])
def test_a_mask_token_that_the_model_lacks(mask: int) -> None:
    with pytest.raises(ValueError, match="the model has no token"):
        PardSession(CountingSession(), 11, mask)
