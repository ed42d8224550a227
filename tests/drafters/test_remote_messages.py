"""The messages of a draft on another machine: their bytes, the text of both sides, and what is left of a draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.drafters.remote.link import Mirror
from edgespec.drafters.remote.messages import (
    Ask,
    BadMessage,
    Begin,
    Change,
    Drafted,
    Fault,
    Message,
    encode,
    measure_path,
    split,
)
from edgespec.drafters.sequential import TruncatedDraw
from tests.core.stats import assert_follows

CHANGE = Change(2, [5, 6, 7], 99)
SAMPLING = SamplingParams(0.7, 40, 0.9, logit_bias=((3, -1.5),))
TREE = Drafted(3, (9,), [1, 2, 3, 4, 5], [-1, -1, 0, 2, 2], [0.5, 0.25, 0.75, 0.5, 0.25], is_guess=True)
MESSAGES: list[Message] = [
    Begin(1, CHANGE, None, 0),
    Begin(2**32 - 1, CHANGE, SAMPLING, 2**63 - 1),
    Ask(7, Change(0, [], 0), 4, 8),
    Ask(8, CHANGE, 16, 63, True),
    TREE,
    Drafted(4, (), [], [], []),
    Fault("it failed."),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_what_it_was(message: Message) -> None:
    (found,) = split(bytearray(encode(message)))
    if isinstance(message, Drafted):
        message = replace(message, emitted=list(message.emitted))
    assert found == message


def test_distributions_are_what_they_were() -> None:
    q = [
        (np.array([1, 5], np.int32), np.array([0.3, 0.7], np.float32)),
        (np.array([2], np.int32), np.ones(1, np.float32)),
    ]
    (found,) = split(bytearray(encode(Drafted(1, (), [5, 2], [-1, 0], [0.7, 1.0], q))))
    assert isinstance(found, Drafted) and found.q is not None
    for (ids, weights), (other_ids, others) in zip(q, found.q, strict=True):
        assert ids.tolist() == other_ids.tolist() and weights.tolist() == others.tolist()


def test_parts_of_messages_wait_for_the_rest() -> None:
    received, found = bytearray(), []
    for byte in b"".join(map(encode, MESSAGES)):
        received.append(byte)
        found += split(received)
    assert len(found) == len(MESSAGES) and not received


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_are_refused_or_read(message: Message, data: st.DataObject) -> None:
    """Never anything but messages and BadMessage."""
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        split(damaged)
    except BadMessage as error:
        assert str(error)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8))
def test_both_sides_hold_the_text(texts: list[list[int]]) -> None:
    ours, theirs = Mirror(), Mirror()
    for text in texts:
        theirs.apply(ours.change_to(text))
        assert ours.tokens == theirs.tokens == text


def test_texts_that_differ_are_noticed() -> None:
    ours, theirs = Mirror(), Mirror()
    theirs.apply(ours.change_to([1, 2, 3]))
    theirs.tokens[1] = 9
    with pytest.raises(BadMessage, match="the two sides hold different texts"):
        theirs.apply(ours.change_to([1, 2]))


@pytest.mark.parametrize(
    ("emitted", "tokens", "parents"),
    [
        ([9], [1, 2, 3, 4, 5], [-1, -1, 0, 2, 2]),
        ([9, 1], [3, 4, 5], [-1, 0, 0]),
        ([9, 1, 3], [4, 5], [-1, -1]),
    ],
)
def test_the_rest_of_a_draft(emitted: list[int], tokens: list[int], parents: list[int]) -> None:
    found = TREE.after(emitted)
    assert found is not None and (list(found.tokens), list(found.parents)) == (tokens, parents)
    whole, rest = (measure_path(each.parents, each.confidences)[0] for each in (TREE, found))
    assert whole - rest == len(emitted) - 1


@pytest.mark.parametrize("emitted", [[], [8], [9, 7], [9, 2], [9, 1, 3, 4], [9, 1, 3, 4, 1]])
def test_a_draft_says_nothing_of_another_text(emitted: list[int]) -> None:
    assert TREE.after(emitted) is None


def test_a_drawn_chain_is_taken_whole() -> None:
    q = [(np.array([1], np.int32), np.ones(1, np.float32))] * 2
    chain = Drafted(3, (9,), [1, 1], [-1, 0], [1.0, 1.0], q)
    assert chain.after([9]) is chain and chain.after([9, 1]) is None


def test_a_truncated_draw_follows_what_it_says() -> None:
    """The distribution that is given is the one that decides, and it depends on the text alone."""
    logits = np.random.default_rng(3).normal(0, 2, 50).astype(np.float32)
    sampler = Sampler(SamplingParams(1.3), 50)
    counts, q = np.zeros(50, int), np.zeros(50)
    for seed in range(2000):
        draw = TruncatedDraw(sampler, seed, 6)
        token, q = draw.draw(logits, [1, 2, 3])
        assert draw.draw(logits, [1, 2, 3])[0] == token
        counts[token] += 1
    kept = np.flatnonzero(q)
    assert set(kept) == set(np.argsort(-logits)[:6]) and q.sum() == pytest.approx(1, abs=1e-6)
    assert_follows(counts[kept].tolist(), (q[kept] / q[kept].sum(dtype=float)).tolist())
    assert counts.sum() == counts[kept].sum()


def test_draws_for_other_texts_are_others() -> None:
    logits = np.zeros(1000, np.float32)
    draw = TruncatedDraw(Sampler(SamplingParams(), 1000), 5, 1000)
    found = {draw.draw(logits, [1, 2])[0]}
    draw.start = 2
    assert len(found | {draw.draw(logits, text)[0] for text in ([1, 2], [1, 3], [1, 2, 3])}) == 4
