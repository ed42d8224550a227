"""Engines with a memory of earlier texts, on the toy runtime: who reads and keeps what; texts stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from edgespec.autopilot.profile import Profile
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.cancel import iterate
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, MemoryUse, Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.errors import Cancelled
from edgespec.memory.administration import TextStore
from edgespec.memory.memory import Memory
from edgespec.models.drafts import DrafterPlan
from tests.engine.packages import Answer, answer

PLAIN = Speculation((), 0)
SUFFIX = Speculation(("suffix",), 8)
PROMPT = "the sea shore, "


def ask(prompt: str = PROMPT, use: MemoryUse | None = None, temperature: float = 0) -> Request:
    return Request(prompt, SamplingParams(temperature=temperature), 40, seed=1, memory=use)


@contextmanager
def open_engine(folder: Path) -> Iterator[Engine]:
    target = load("tree", LoadOptions())
    drafters = [LoadedDrafter(DrafterPlan(drafter_specs()["suffix"]))]
    engine = Engine(target, drafters, SUFFIX, 2, Memory(folder, "letters", 2**24))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with open_engine(tmp_path) as opened:
        yield opened


def count_accepted(found: Answer) -> int:
    return sum(step.n_accepted for step in found.steps)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("speculation", [SUFFIX, Speculation(("suffix",), 3, 9)], ids=["chain", "tree"])
def test_what_was_said_once_is_drafted_and_stays_the_same(
    engine: Engine, speculation: Speculation, temperature: float
) -> None:
    request = ask(use=MemoryUse(), temperature=temperature)
    wanted = answer(engine, ask(temperature=temperature), PLAIN)
    cold, warm = answer(engine, request, speculation), answer(engine, request, speculation)
    assert cold.tokens == warm.tokens == wanted.tokens
    assert count_accepted(warm) > max(20, count_accepted(cold))
    other = ask("another text, ", MemoryUse(), temperature)  # drafted from what does not belong to it
    assert answer(engine, other, speculation).tokens == answer(engine, other, PLAIN).tokens


def test_a_request_without_memory_neither_reads_nor_keeps(engine: Engine) -> None:
    assert engine.memory is not None
    answer(engine, ask())
    assert engine.memory.space("").find(engine.encode(PROMPT), 1) is None
    answer(engine, ask(use=MemoryUse()))
    assert engine.memory.space("").find(engine.encode(PROMPT), 1) is not None
    engine.draft_stats = DraftStats(Profile({1: 1.0, 16: 1.1}))
    for speculation in (SUFFIX, Speculation(("suffix",))):
        assert not any(step.n_drafted for step in answer(engine, ask(), speculation).steps)


def test_a_namespace_serves_nobody_else(engine: Engine) -> None:
    for namespace in ("", "first", "second"):
        first, again = (answer(engine, ask(use=MemoryUse(namespace))) for _ in range(2))
        assert not any(step.n_drafted for step in first.steps), "nothing is known of another's text"
        assert count_accepted(again) > 20


def test_what_was_said_before_a_cancel_is_kept(engine: Engine) -> None:
    steps = 0

    def check() -> None:
        if steps == 20:
            raise Cancelled

    for event in iterate(engine.stream(ask(use=MemoryUse(source="conversation"))), check):
        steps += isinstance(event, Step)
        if isinstance(event, Finished):
            assert event.reason == "cancelled"
    found = answer(engine, ask(use=MemoryUse()))
    assert count_accepted(found) > 10


def test_answers_beside_each_other_use_their_own_namespaces(engine: Engine) -> None:
    """The slots of one engine; each generation advances in turn."""
    answer(engine, ask(use=MemoryUse("warm")))
    streams = {name: engine.generate(ask(use=MemoryUse(name))) for name in ("warm", "cold")}
    drafted = dict.fromkeys(streams, 0)
    while streams:
        for name, stream in tuple(streams.items()):
            event = next(stream, None)
            if event is None:
                del streams[name]
            elif isinstance(event, Step):
                drafted[name] += event.n_drafted
    assert drafted["warm"] > 0 == drafted["cold"]


def test_a_text_that_is_forgotten_during_its_answer_is_not_kept(engine: Engine, tmp_path: Path) -> None:
    """Also where another generation has noticed before it ends."""
    assert engine.memory is not None
    stream = engine.generate(ask(use=MemoryUse(source="conversation")))
    assert any(isinstance(event, Step) for event in stream)
    with closing(TextStore.open(tmp_path)) as store:
        store.forget("conversation")
        answer(engine, ask("another text, ", MemoryUse()))
        assert list(stream)
        engine.memory.flush()
        assert store.query("SELECT count(*) FROM texts") == [(1,)]
        assert [record.source for record in store.export()] == [None, None]
