"""Several sessions over one llama.cpp context: whatever the others do meanwhile, each computes what it would alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.library import library
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.core.peers import SOLO, BatchPeers
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.core.tree import path_to
from edgespec.errors import BackendError, Cancelled
from tests.backends.player import CONTEXT, TOLERANCE, Alone, Player
from tests.contract.runtimes import prefill
from tests.contract.test_session import PROMPT
from tests.gguf_models import MAKERS

SLOTS = 5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("shared") / "llama.gguf"
    MAKERS["llama"](found)
    return found


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[LlamaModel]:
    loaded = load(path, LoadOptions(context_size=CONTEXT, threads=1, caches=SLOTS))
    loaded.lends_cells = True  # so that all are over the same ones
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def many(path: Path) -> Iterator[LlamaModel]:
    """The same with more slots, each of which has cells of its own."""
    loaded = load(path, LoadOptions(context_size=CONTEXT + 32, threads=1, caches=64))
    assert loaded.has_streams
    yield loaded
    loaded.close()


@pytest.fixture
def alone(model: LlamaModel) -> Iterator[Alone]:
    found = Alone(model)
    yield found
    found.close()


def open_sessions(model: LlamaModel, n: int) -> list[LlamaSession]:
    return [model.open_session(shared=True) for _ in range(n)]


def test_one_decode_serves_all(model: LlamaModel, alone: Alone) -> None:
    one, two, three = sessions = open_sessions(model, 3)
    texts = [PROMPT[i:] for i in range(3)]
    for session, text in zip(sessions, texts, strict=True):
        prefill(session, text)
    drafts = [NO_DRAFT, Draft.chain([4, 5, 6]), Draft(np.array([7, 8], np.int32), np.array([-1, -1], np.int32))]
    scores = [session.forward(9, draft) for session, draft in zip(sessions, drafts, strict=True)]
    assert one.peers == BatchPeers(2, 4 + 3, False) and two.peers == BatchPeers(2, 1 + 3, False)
    for text, draft, each in zip(texts, drafts, scores, strict=True):
        for node in range(-1, len(draft)):
            path = draft.tokens[list(path_to(draft, node))].tolist()
            assert np.abs(each.logits(node + 1) - alone.after([*text, 9, *path])).max() < TOLERANCE
    assert [each.peer_rows for each in scores] == [7, 4, 5]
    assert scores[0].waited_s > 0 and not scores[0].peer_wait_s
    for each in scores[1:]:
        assert not each.waited_s and each.peer_wait_s == scores[0].waited_s
    for session in sessions:
        session.commit(())
        session.close()
    assert three.position == len(texts[2]) + 1


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_anything(model: LlamaModel, alone: Alone, seed: int) -> None:
    play(model, alone, seed)


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_anything_in_streams(many: LlamaModel, alone: Alone, seed: int) -> None:
    play(many, alone, seed)


def play(model: LlamaModel, alone: Alone, seed: int) -> None:
    """Whoever does what, everyone's scores are what they would be alone."""
    rng = np.random.default_rng(seed)
    players = [Player(model, alone, rng) for _ in range(2)]
    keeper = model.open_session(shared=True)  # the context stays while the others come and go; a gap between their ids
    players += [Player(model, alone, rng) for _ in range(SLOTS - 3)]
    for player in players:
        player.others = players
    for _ in range(400):
        players[int(rng.integers(len(players)))].act()
    assert all(player.compared > 10 for player in players)
    for player in players:
        player.close()
    keeper.close()


def test_a_prefix_is_copied_from_stream_to_stream(many: LlamaModel, alone: Alone) -> None:
    """Before its source goes on, and without what the source holds after it. A few tokens are not worth a copy."""
    source, one, two = open_sessions(many, 3)
    text = [token % 60 + 1 for token in range(7, 107)]
    prefill(source, text)
    assert not one.adopt(source, 64) and one.position == 0
    assert one.adopt(source, 70) and two.adopt(one, 65)
    prefill(source, PROMPT)
    for session, n in ((one, 70), (two, 65)):
        assert session.tokens == text[:n]
        scores = session.forward(9, Draft.chain([4]))
        assert np.abs(scores.logits(1) - alone.after([*text[:n], 9, 4])).max() < TOLERANCE
    for session in (source, one, two):
        session.close()


@pytest.mark.parametrize("max_unpolled_s", [0.0, 1e9], ids=["polled at each node", "polled once"])
def test_one_who_leaves_does_not_stop_the_others(
    max_unpolled_s: float, model: LlamaModel, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.backends.llamacpp.native_context._MAX_UNPOLLED_S", max_unpolled_s)
    gone: set[int] = set()

    def check(who: int) -> None:
        if who in gone:
            raise Cancelled

    one, two = (model.open_session(shared=True) for _ in range(2))
    by_one, by_two = (partial(cancellable, partial(check, who)) for who in range(2))
    prefill(one, PROMPT)
    prefill(two, PROMPT[3:])
    with by_one():
        scores = [one.forward(1, NO_DRAFT)]
    with by_two():
        scores.append(two.forward(2, Draft.chain([3, 4])))
    gone.add(0)
    with by_two():
        assert np.abs(scores[1].logits(2) - alone.after([*PROMPT[3:], 2, 3, 4])).max() < TOLERANCE
    one.commit(())
    two.commit((0,))
    gone.clear()
    with by_one():
        scores = [one.forward(1, NO_DRAFT)]
    with by_two():
        scores.append(two.forward(2, NO_DRAFT))
    gone.update((0, 1))
    for each in scores:
        with pytest.raises(Cancelled):
            each.argmax()
    for session, text in ((one, [*PROMPT, 1, 5]), (two, [*PROMPT[3:], 2, 3, 6])):
        assert np.abs(prefill(session, text) - alone.after(text)).max() < TOLERANCE
        session.close()


def test_a_failed_decode_is_told_to_all_who_shared_it(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = open_sessions(model, 2)
    prefill(one, PROMPT)
    prefill(two, PROMPT)
    scores = [one.forward(1, NO_DRAFT), two.forward(2, NO_DRAFT)]
    with monkeypatch.context() as patch:
        patch.setattr(library().api, "llama_decode", lambda *_: -3)
        for each in scores:
            with pytest.raises(BackendError, match="code -3"):
                each.argmax()
    one.close()
    two.close()
    again = model.open_session(shared=True)  # over a new context
    prefill(again, PROMPT)
    again.close()


def test_a_context_that_has_failed_is_not_used_again(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, one = open_sessions(model, 2)
    prefill(idle, PROMPT)
    prefill(one, PROMPT)
    with monkeypatch.context() as patch, pytest.raises(BackendError, match="code -3"):
        patch.setattr(library().api, "llama_decode", lambda *_: -3)
        one.forward(1, NO_DRAFT).argmax()
    one.close()
    again = model.open_session(shared=True)  # although `idle` still holds the other
    assert again.context is not idle.context
    prefill(again, PROMPT)
    idle.close()
    again.close()


def test_more_rows_than_one_decode_takes(model: LlamaModel, alone: Alone) -> None:
    """What is staged goes ahead when there is no room for more; whoever reads it later finds it, and what it took."""
    sessions = open_sessions(model, SLOTS)
    for session in sessions:
        prefill(session, PROMPT)
    draft = Draft.chain(list(range(1, 21)))
    scores = [session.forward(9, draft) for session in sessions]  # 105 rows, of which a decode takes 64
    for each in scores:
        assert np.abs(each.logits(20) - alone.after([*PROMPT, 9, *range(1, 21)])).max() < TOLERANCE
        assert each.waited_s > 0 or each.peer_wait_s > 0
    reported = {each.peer_rows for each in scores if not each.peer_wait_s}
    assert reported <= {42, None, 21}, "one tells of each decode, or nobody where others were in its seconds"
    for session in sessions:
        session.commit(range(20))
        session.close()


def test_as_many_slots_as_there_may_be(tmp_path: Path) -> None:
    path = tmp_path / "llama.gguf"
    MAKERS["llama"](path)
    model = load(path, LoadOptions(context_size=32, threads=1, caches=64))
    model.lends_cells = True
    sessions = open_sessions(model, 64)
    for session in sessions:
        prefill(session, PROMPT[:8])
    tree = Draft(np.array([3, 4, 5, 6], np.int32), np.array([-1, -1, 0, 0], np.int32))
    scores = [session.forward(9, tree if session.draft_limit >= 4 else NO_DRAFT) for session in sessions]
    assert sum(len(each.read()) for each in scores) > 64 * 3
    for session in sessions:
        session.commit(())
        session.close()
    model.close()


def test_there_are_as_many_slots_as_asked_for(model: LlamaModel) -> None:
    sessions = open_sessions(model, SLOTS)
    with pytest.raises(BackendError, match="all caches of the model are in use"):
        model.open_session(shared=True)
    sessions[2].close()
    sessions[2] = model.open_session(shared=True)
    assert sessions[0].peers == SOLO
    for session in sessions:
        session.close()


def test_what_is_read_in_company_is_read_in_small_parts(model: LlamaModel) -> None:
    one, two = open_sessions(model, 2)
    prefill(one, PROMPT)
    three = model.open_session(shared=True)
    assert [event.done for event in three.prefill((PROMPT * 4)[:CONTEXT]) if hasattr(event, "done")] == [120]
    three.close()
    one.forward(1, NO_DRAFT)
    reading = two.prefill((PROMPT * 4)[:CONTEXT])
    next(reading)
    assert one.peers == BatchPeers(0, 0, True)
    assert two.peers == BatchPeers(1, 1, False)
    done = [event.done for event in reading if hasattr(event, "done")]
    assert done == [64, 120]
    one.close()
    two.close()


WINDOW = "cells behind its attention window are not kept"


@pytest.mark.parametrize(
    ("name", "why"),
    [("mamba", "its state is recurrent"), ("hybrid", "its state is recurrent"), ("sliding-window", WINDOW)],
)
def test_models_that_share_nothing_say_so(tmp_path: Path, name: str, why: str) -> None:
    """With windows test_any_order_of_anything fails: llama.cpp overwrites what others have moved on from, though they
    may come back to it, or hand it on.
    """
    path = tmp_path / "model.gguf"
    MAKERS[name](path)
    model = load(path, LoadOptions(context_size=64, threads=1, caches=3))
    assert model.no_batching_reason == why
    session = model.open_session(shared=True)
    assert not session.context.is_shared
    session.close()
    model.close()


@pytest.mark.parametrize("caches", [1, 3])
def test_a_saved_state_is_restored_by_models_with_any_number_of_slots(caches: int, many: LlamaModel) -> None:
    """The last slot saves, and one of a model with other slots goes on as if it had read the text."""
    text = [*PROMPT, *reversed(PROMPT)]
    slots = open_sessions(many, 3)
    expected = prefill(slots[2], text).copy()
    saved = slots[2].save_state(2**30)
    assert saved is not None
    other = load(many.path, LoadOptions(context_size=CONTEXT + 32, threads=1, caches=caches))
    theirs = open_sessions(other, caches)
    session = theirs[-1]
    assert session.restore_state(text, memoryview(bytearray(saved))) and session.position == len(text)
    again = session.save_state(2**30)
    assert again is not None and len(again) == len(saved)
    session.rewind(len(text) - 1)
    assert np.abs(prefill(session, text) - expected).max() < TOLERANCE
    for each in (*slots, *theirs):
        each.close()
    other.close()


def test_nothing_is_restored_where_a_stream_is_about_to_be_copied(many: LlamaModel) -> None:
    """The copy, which is made by the next decode, would have it in place of the text."""
    text, other = [*PROMPT, *PROMPT, *PROMPT][:90], [*reversed(PROMPT)]
    source, copy, third = open_sessions(many, 3)
    prefill(third, other)
    state = third.save_state(2**30)
    assert state is not None
    prefill(source, text)
    assert copy.adopt(source, 80)
    for session in (source, copy):
        assert session.restore_state(other, memoryview(bytearray(state))) is None
    expected = prefill(source, text).copy()
    copied = prefill(copy, text).copy()
    assert np.abs(copied - expected).max() < TOLERANCE
    assert copy.restore_state(other, memoryview(bytearray(state))) is True
    for session in (source, copy, third):
        session.close()


def test_streams_that_are_not_neighbours_decode_together(many: LlamaModel) -> None:
    """Rows are computed and dropped for those between, whose texts stay as they were."""
    first, between, last = open_sessions(many, 3)
    prefill(between, PROMPT[:20])
    for session in (first, last):
        prefill(session, PROMPT)
    alone = [session.forward(7, NO_DRAFT).logits(0).copy() for session in (first, last)]
    for session in (first, last):
        session.commit(())
        session.rewind(len(PROMPT))
    together = [session.forward(7, NO_DRAFT) for session in (first, last)]
    for scores, expected in zip(together, alone, strict=True):
        assert np.abs(scores.logits(0) - expected).max() < TOLERANCE
    for session in (first, last):
        session.commit(())
    assert between.position == 20
    expected = prefill(last, PROMPT).copy()
    assert np.abs(prefill(between, PROMPT) - expected).max() < TOLERANCE
    for session in (first, between, last):
        session.close()
