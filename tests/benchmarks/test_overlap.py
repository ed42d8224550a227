"""Drafting while the target verifies: the thread changes no proposal, and the program runs on the embedded pair."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import wait

import numpy as np
import pytest

from benchmarks.ahead import AheadDrafter, AheadSession, TruncatedSession
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.drafters.candidates import RequestDraw
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from edgespec.errors import Cancelled
from tests.benchmarks.conftest import Program
from tests.drafters.sessions import MODEL, TEXT, CountingSession, V


def open_ahead(session: CountingSession) -> tuple[AheadDrafter, AheadSession]:
    ahead = AheadSession(TruncatedSession(session, V))
    return AheadDrafter("model", ahead), ahead


def propose(drafter: Drafter, text: Sequence[int], depth: int, units: int = 99) -> DraftTree:
    tree = DraftTree()
    for n, _ in enumerate(drafter.expand(tree, text, Budget(depth, depth)), 1):  # a chain; the thread grows no trees
        if n == units:
            break
    return tree


def finish(ahead: AheadSession) -> None:
    """Let the thread read all that it was asked to, or fail."""
    assert ahead._running is not None
    wait([ahead._running])


def make_draw(seed: int) -> RequestDraw:
    return RequestDraw(Sampler(SamplingParams(temperature=0.9, top_k=5), V), np.random.default_rng(seed))


@pytest.mark.parametrize("is_drawn", [False, True])
def test_it_proposes_what_a_draft_model_without_a_thread_proposes(is_drawn: bool) -> None:
    rng = np.random.default_rng(3)
    drafter, ahead = open_ahead(CountingSession(context_size=512))
    plain = SequentialDrafter("model", ModelDraftSession(CountingSession(context_size=512), V))
    for start in (TEXT, TEXT[:5], [*TEXT[:5], 2, 2]):
        text = list(start)
        for each in (drafter, plain):
            each.begin(text[:-1], make_draw(7) if is_drawn else None)
        for _ in range(40):
            depth = int(rng.integers(1, 6))
            units = int(rng.integers(1, depth + 1))
            found, wanted = (propose(each, text, depth, units) for each in (drafter, plain))
            assert (found.tokens, found.parents, found.votes) == (wanted.tokens, wanted.parents, wanted.votes)
            for q, expected in zip(found.q, wanted.q, strict=True):
                np.testing.assert_array_equal(q, expected)
            if rng.random() < 0.8:
                finish(ahead)
            path = found.path_tokens(found.deepest("model"))
            kept = path[: int(rng.integers(0, len(path) + 1))] if rng.random() < 0.4 else path
            best = int(np.argmax(MODEL.logits([*text, *kept])))
            text += [*kept, best if rng.random() < 0.7 else int(rng.integers(V))]
    assert ahead.n_right > 20 and ahead.n_forecasts - ahead.n_right > 20
    drafter.close()


def test_a_right_forecast_needs_no_forward() -> None:
    session = CountingSession()
    drafter, ahead = open_ahead(session)
    drafter.begin(TEXT[:-1], None)
    first = propose(drafter, TEXT, 3)
    finish(ahead)
    path = first.path_tokens(first.deepest("model"))
    text = [*TEXT, *path, int(np.argmax(MODEL.logits([*TEXT, *path])))]
    n_run, n_ahead = len(session.rows), len(ahead.forwards)
    assert drafter.pending_tokens(text) == 0
    second = propose(drafter, text, 3)
    ahead.stop()
    assert max(second.depths) == 3 and ahead.n_right == 1
    assert len(session.rows) - n_run == len(ahead.forwards) - n_ahead  # all of them are the thread's
    drafter.close()


@pytest.mark.parametrize("error", [MemoryError("no memory"), Cancelled()])
def test_what_the_thread_raises_is_raised_when_the_drafter_is_asked_again(error: Exception) -> None:
    raised: list[Exception] = [error, error]

    def check() -> None:
        if raised and threading.current_thread() is not threading.main_thread():
            raise raised.pop()

    drafter, ahead = open_ahead(CountingSession(check=check))
    drafter.begin(TEXT[:-1], None)
    wanted = propose(drafter, TEXT, 3)
    finish(ahead)
    with pytest.raises(type(error)):
        propose(drafter, TEXT, 3)
    assert propose(drafter, TEXT, 3).tokens == wanted.tokens
    finish(ahead)
    if isinstance(error, Cancelled):  # of the generation that has ended
        drafter.begin(TEXT[:-1], None)
        assert propose(drafter, TEXT, 3).tokens == wanted.tokens
    drafter.close()


def test_overlap(program: Program) -> None:
    amounts = ("--prompts", 1, "--tokens", 40, "--repeats", 1)
    result = program("benchmarks.overlap", "--exact", *amounts)
    assert [row["draft"] for row in result["rows"]] == ["right", "wrong"]
    for row in result["rows"]:
        assert all(min(each["alone_ms"], each["beside_ms"]) > 0 for each in row["costs"].values())
        plain, drafting, ahead = (row["arms"][name] for name in ("plain", "drafting", "ahead"))
        assert plain["wall"] == plain["busy"] == 1 and min(ahead["wall"], ahead["busy"]) > 0
        for name in ("tokens_per_round", "accepted", "equal"):
            assert drafting[name] == ahead[name]
        assert ahead["equal"] == 1 and 0 <= ahead["forecasts_right"] <= 1 and ahead["waited_ms"] >= 0
    right, wrong = (row["arms"]["ahead"]["tokens_per_round"] for row in result["rows"])
    assert right > wrong >= 1
