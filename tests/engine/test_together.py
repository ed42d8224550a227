"""Generations whose forwards are done as one: each says what it says alone, however the others draft, come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends.llamacpp.library import library
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.cancel import iterate
from edgespec.core.peers import Yield
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Finished, Request
from edgespec.errors import BackendError, Cancelled
from tests.engine.conftest import PLAIN, eager, open_engine
from tests.engine.prompts import CODE
from tests.gguf_models import find_trained

GREEDY = SamplingParams(temperature=0)
AT_ONCE = 12
KINDS = {
    "plain": PLAIN,
    "chains": Speculation(("model",), 4),
    "trees": Speculation(("model",), 3, 9),
    "lookups": Speculation(("ngram",), 5),
    "autopilot": Speculation(("ngram", "model")),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    options = LoadOptions(threads=1, context_size=256, caches=AT_ONCE)
    opened = open_engine(find_trained("target"), find_trained("draft"), options)
    opened.draft_stats = eager()
    yield opened
    opened.close()


@pytest.fixture
def over_the_same_cells() -> Iterator[Engine]:
    """The same, but all slots lie in the same cells, where drafts may be trees."""
    options = LoadOptions(threads=1, context_size=256, caches=AT_ONCE)
    opened = open_engine(find_trained("target"), find_trained("draft"), options)
    assert isinstance(opened.target, LlamaModel)
    opened.target.lends_cells = True
    yield opened
    opened.close()


def together(engine: Engine, requests: Sequence[Request], kind: Speculation | None = None) -> list[list[Event]]:
    """The events of each, all running from Yield to Yield in turn."""
    found: list[list[Event]] = [[] for _ in requests]
    generations = [engine.generate(request, speculation=kind) for request in requests]
    running = list(zip(found, generations, strict=True))
    while running:
        running = [each for each in running if goes_on(*each)]
    return found


def goes_on(events: list[Event], generation: Iterator[Event | Yield]) -> bool:
    for event in generation:
        if isinstance(event, Yield):
            return True
        events.append(event)
    return False


def tokens(events: Sequence[Event]) -> tuple[int, ...]:
    assert isinstance(events[-1], Finished)
    return events[-1].tokens


@pytest.mark.parametrize("kind", KINDS)
def test_twelve_at_once_say_what_each_says_alone(engine: Engine, shared: Engine, kind: str) -> None:
    requests = [Request(CODE[i], GREEDY, max_tokens=20 + 3 * i) for i in range(AT_ONCE)]
    engine.speculation = PLAIN
    alone = [tokens(list(engine.stream(request))) for request in requests]
    beside = together(shared, requests, KINDS[kind])
    session = engine.target.open_session()
    for request, expected, events in zip(requests, alone, beside, strict=True):
        assert isinstance(request.prompt, str)
        fork = first_divergence(session, engine.encode(request.prompt), expected, tokens(events))
        assert fork is None or fork.is_near_tie, fork
    session.close()
    steps = [event for events in beside for event in events if isinstance(event, Step) and event.index]
    assert max(step.n_peer_rows or 0 for step in steps) >= AT_ONCE // 2, "they did share forwards"
    if kind != "autopilot":  # which drafts where the measured times of this machine say so
        assert (sum(step.n_accepted for step in steps) > 0) == (kind != "plain")


def test_some_leave_and_others_come(engine: Engine, shared: Engine) -> None:
    """Cancelled at any place, one frees its cache for the next, and the rest go on as if it had not been there."""
    engine.speculation = PLAIN
    gone: set[int] = set()

    def check(who: int) -> None:
        if who in gone:
            raise Cancelled

    requests = [Request(CODE[i], GREEDY, max_tokens=24) for i in range(12)]
    running = {}
    found: dict[int, list[Event]] = {i: [] for i in range(12)}
    waiting = list(range(12))
    rounds = 0
    while waiting or running:
        rounds += 1
        while waiting and len(running) < 5:
            who = waiting.pop(0)
            running[who] = iterate(shared.generate(requests[who], KINDS["trees"]), partial(check, who))
        if rounds % 4 == 0:
            gone |= {who for who in running if who % 3 == 0}
        running = {who: each for who, each in running.items() if goes_on(found[who], each)}
    session = engine.target.open_session()
    for who, events in found.items():
        last = events[-1]
        assert isinstance(last, Finished)
        expected = tokens(list(engine.stream(requests[who])))
        fork = first_divergence(session, engine.encode(CODE[who]), expected, last.tokens)
        assert fork is None or fork.is_near_tie
        if last.reason == "cancelled":
            assert who in gone
        else:
            assert fork is not None or last.tokens == expected
    assert any(isinstance(events[-1], Finished) and events[-1].reason == "cancelled" for events in found.values())
    session.close()


def test_what_another_has_read_is_taken_over_where_it_is_more(shared: Engine) -> None:
    """From one that is still reading, too; and a cache that holds more is not given up for it."""
    long = "".join(f"value_{i} = compute(value_{i - 1}, {i})\n" for i in range(1, 13))
    reader = shared.generate(Request(long, GREEDY, max_tokens=2))
    held = 0
    while not held:  # until it has read something, though not all
        event = next(reader)
        held = event.done if isinstance(event, PrefillProgress) else 0
    (second,) = together(shared, [Request(long + "value", GREEDY, max_tokens=2)])
    assert isinstance(second[-1], Finished) and second[-1].metrics.cached_tokens >= held - 1
    while goes_on([], reader):
        pass
    (third,) = together(shared, [Request(long + "value_1", GREEDY, max_tokens=2)])
    assert isinstance(third[-1], Finished)
    assert third[-1].metrics.cached_tokens >= len(shared.encode(long)) - 1


def test_a_failure_ends_those_who_shared_it_and_nobody_after_them(
    shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [shared.generate(Request(CODE[i], GREEDY, 30)) for i in range(3)]
    for _ in range(4):
        for each in running:
            assert goes_on([], each)
    with monkeypatch.context() as patched:
        patched.setattr(library().api, "llama_decode", lambda *_: -3)
        for each in running:
            with pytest.raises(BackendError, match="code -3"):
                goes_on([], each)
    assert len(tokens(together(shared, [Request(CODE[0], GREEDY, 9)])[0])) == 9


def test_more_than_there_are_caches_wait(shared: Engine) -> None:
    late = Request(CODE[1], GREEDY, 9)
    expected = tokens(together(shared, [late])[0])
    running = [shared.generate(Request(CODE[0], GREEDY, 9)) for _ in range(AT_ONCE)]
    for each in running:
        assert goes_on([], each)
    events: list[Event] = []
    running.append(waiting := shared.generate(late))
    while running:
        assert not events or len(running) <= AT_ONCE
        running = [each for each in running if goes_on(events if each is waiting else [], each)]
    assert tokens(events) == expected


def test_whoever_leaves_amid_a_tree_leaves_nothing_behind(over_the_same_cells: Engine) -> None:
    """All the sequences of its branches are there for the others, though nobody takes up its cache."""
    shared, gone = over_the_same_cells, False

    def check() -> None:
        if gone:
            raise Cancelled

    def spare() -> set[int]:
        contexts = {cache.target.context for cache in shared._slots._kept}  # type: ignore[attr-defined]
        return {len(context._spare) for context in contexts}

    together(shared, [Request(CODE[0], GREEDY, 9)])
    before = spare()
    generation = iterate(shared.generate(Request(CODE[0], GREEDY, 60), Speculation(("model",), 3, 12)), check)
    while spare() == before:
        assert goes_on([], generation)
    gone = True
    events: list[Event] = []
    while goes_on(events, generation):
        pass
    assert isinstance(events[-1], Finished) and events[-1].reason == "cancelled"
    assert spare() == before


def test_an_abandoned_generation_frees_its_cache(shared: Engine) -> None:
    for _ in range(AT_ONCE + 1):
        generation = shared.generate(Request(CODE[3], GREEDY, 9))
        assert goes_on([], generation) and goes_on([], generation)
        generation.close()  # type: ignore[attr-defined]
    assert len(tokens(together(shared, [Request(CODE[0], GREEDY, 9)])[0])) == 9


@pytest.mark.parametrize("caches", [3, 16], ids=["over the same cells", "in streams"])
def test_a_second_conversation_with_the_same_beginning_leaves_the_first_one_its_cache(caches: int) -> None:
    options = LoadOptions(threads=1, context_size=1024, caches=caches)
    engine = open_engine(find_trained("target"), find_trained("draft"), options)
    assert isinstance(engine.target, LlamaModel)
    engine.target.lends_cells = caches == 3
    assert engine.target.has_streams == (caches == 16)
    beginning = "".join(CODE[:12])
    first, second = beginning + CODE[12] * 5, beginning + CODE[13] * 5

    def reused(prompt: str) -> int:
        (read, *_) = [e for e in engine.stream(Request(prompt, GREEDY, 4)) if isinstance(e, PrefillProgress)]
        return read.reused

    n, common = len(engine.encode(first)), len(engine.encode(beginning))
    assert 64 < n - common < common, "enough to be kept, less than what is in common"
    assert reused(first) == 0
    reused(beginning[:20])  # has less in common with it than a copy between streams is worth
    assert reused(second) >= common - 2, "taken over from the first one"
    assert reused(first) == n and reused(second) == len(engine.encode(second)), "both are kept"
    engine.close()
