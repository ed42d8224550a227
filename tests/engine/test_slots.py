"""Several caches of one engine: which is taken, what is read again, and that answers do not depend on it."""

from __future__ import annotations

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.backends.toy_session import ToySession
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.errors import BackendError
from tests.engine.conftest import PLAIN, list_loaded

GREEDY = SamplingParams(temperature=0, logit_bias=((256, -1000.0),))
ONE, TWO, THREE = ("a long system text. " * 20, "b other words here. " * 20, "c and a third one. " * 20)


def made(caches: int) -> Engine:
    options = LoadOptions(context_size=4096)
    return Engine(load("tree", options), list_loaded(model=load("draft", options)), Speculation(("model",), 3), caches)


def answer(engine: Engine, text: str) -> tuple[int, ...]:
    (finished,) = [e for e in engine.stream(Request(text, GREEDY, 20, seed=1)) if isinstance(e, Finished)]
    return finished.tokens


@pytest.mark.parametrize("caches", [1, 2, 3])
def test_answers_do_not_depend_on_slots(caches: int) -> None:
    engine, alone = made(caches), made(1)
    texts = [ONE, TWO, ONE + "more", THREE, TWO + "more", ONE, THREE + "x"]
    assert [answer(engine, text) for text in texts] == [answer(alone, text) for text in texts]
    engine.close()


def positions(engine: Engine) -> list[int]:
    return sorted(cache.target.position for cache in engine._slots._kept)


def test_conversations_that_take_turns_keep_their_slots() -> None:
    engine = made(2)
    answer(engine, ONE)
    answer(engine, TWO)
    first, second = (cache.target for cache in engine._slots._kept)
    answer(engine, ONE + "and on")
    assert engine._slots._kept[-1].target is first
    answer(engine, TWO + "and on")
    assert engine._slots._kept[-1].target is second
    answer(engine, THREE)
    assert engine._slots._kept[-1].target is first, "the one used least lately made way"
    assert len(positions(engine)) == 2
    engine.close()
    assert not engine._slots._kept


def test_a_prompt_that_is_asked_again_is_answered_in_the_same_slot() -> None:
    engine = made(2)
    first = answer(engine, "ab")  # the answer, which is lost, is longer
    assert answer(engine, "ab") == first and len(engine._slots._kept) == 1
    answer(engine, "a")
    assert len(engine._slots._kept) == 2, "another prompt does not cut this text"
    engine.close()


@pytest.mark.parametrize("kind", ["tree", "recurrent"])
def test_a_conversation_goes_on_in_its_own_slot_where_no_other_can_take_over_its_cache(kind: str) -> None:
    """A recurrent state cannot be copied, and the last hundred tokens of the conversation have been rewritten."""
    engine = Engine(load(kind, LoadOptions(context_size=4096)), [], PLAIN, 2)
    long = ONE + TWO
    first = engine.stream(Request(long, GREEDY, 100, seed=1))
    assert any(isinstance(event, Finished) for event in first)
    metrics = [e.metrics for e in engine.stream(Request(long + THREE, GREEDY, 5, seed=1)) if isinstance(e, Finished)]
    if kind == "tree":
        assert metrics[0].cached_tokens == len(long) and len(engine._slots._kept) == 2
    else:
        assert engine._slots._kept[-1].tokens[: len(long)] == list(long.encode()) and not engine._slots._adopts
        assert len(engine._slots._kept) == 2, "the slot that was opened beside it stays for others"
    engine.close()


def test_a_copy_that_fails_once_does_not_end_taking_over(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(load("tree", LoadOptions(context_size=4096)), [], PLAIN, 2)
    long = ONE + TWO
    answer(engine, long)
    with monkeypatch.context() as failing:
        failing.setattr(ToySession, "adopt", lambda *_: False)
        answer(engine, long[:-200] + ONE)
    assert not engine._slots._adopts
    answer(engine, long[:300] + THREE)
    assert engine._slots._adopts
    engine.close()


def test_slots_that_shall_not_take_over_prefixes_are_not_opened_for_it() -> None:
    """A draft model of a fixed length reads again what its target has taken over."""
    engine = made(3)
    long = ONE + TWO
    answer(engine, long)
    answer(engine, long[:300] + THREE)
    assert len(engine._slots._kept) == 2 and not engine._slots._adopts
    engine.close()


def test_where_there_is_no_memory_for_another_the_first_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(2)
    expected = [answer(engine, text) for text in (ONE, TWO)]
    engine.close()
    engine = made(2)
    assert answer(engine, ONE) == expected[0]

    def refused(*_: object, **__: object) -> None:
        raise BackendError("no memory.", hint="None.")

    monkeypatch.setattr(engine.target, "open_session", refused)
    assert answer(engine, TWO) == expected[1] and len(engine._slots._kept) == 1
    assert engine.max_concurrency == 1, "as many answers as there are caches"
    engine.close()


def test_a_failure_drops_the_caches_that_it_may_have_spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(2)
    for text in (ONE, TWO):
        answer(engine, text)
    kept = engine._slots._kept[0]

    def failing(*_: object, **__: object) -> None:
        raise BackendError("broken.", hint="None.")

    monkeypatch.setattr(engine._slots._kept[1].target, "forward", failing)
    with pytest.raises(BackendError, match="broken"):
        answer(engine, TWO + "more")
    assert kept not in engine._slots._kept and not engine._slots._kept
    assert answer(engine, TWO + "more")
    engine.close()
