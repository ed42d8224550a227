"""What answers do with a draft server, with a slow one, and without one that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import LetterModel, ToyRuntimeModel
from edgespec.core.protocols import NO_DRAFT, Budget, Round, Step
from edgespec.core.sampling import Logits, SamplingParams
from edgespec.core.tree import DraftTree
from edgespec.drafters.remote.drafter import RemoteDrafter
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Notice, Request
from tests.draft_server import PROMPT, QUICK, REMOTE, DraftServer, V, hear, load_letters, open_engine, until


@dataclass(frozen=True)
class Slow(LetterModel):
    """Computes until `gate` is set."""

    gate: threading.Event = field(default_factory=threading.Event)

    def logits(self, prefix: Sequence[int]) -> Logits:
        self.gate.wait(20)
        return super().logits(prefix)


def test_nobody_waits_long_for_a_slow_server() -> None:
    """The first wait is a unit without proposals; until its reply comes there are none."""
    model = Slow()
    server = DraftServer(lambda: ToyRuntimeModel("linear", model, LoadOptions(context_size=256)))
    remote = server.connect(QUICK)
    drafter = RemoteDrafter(remote.open_link(V, lambda: None), V)
    drafter.begin(PROMPT, None)
    tree, text = DraftTree(), [*PROMPT, 32]
    assert [sum(1 for _ in drafter.expand(tree, text, Budget(3, 3))) for _ in range(3)] == [1, 0, 0] and not len(tree)
    model.gate.set()

    def drafts_again() -> bool:
        text.append(101)
        drafter.observe(Round(text, (101,), NO_DRAFT, (), 0, None))
        return bool(sum(1 for _ in drafter.expand(tree, text, Budget(3, 3))) and len(tree))

    until(drafts_again)
    drafter.close()
    remote.close()
    server.close()


def test_a_server_that_owes_a_reply_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.drafters.remote.link._STALL_S", 1.0)
    model = Slow()
    server = DraftServer(lambda: ToyRuntimeModel("linear", model, LoadOptions(context_size=256)))
    remote = server.connect(QUICK)
    drafter = RemoteDrafter(remote.open_link(V, lambda: None), V)
    drafter.begin(PROMPT, None)
    assert sum(1 for _ in drafter.expand(DraftTree(), [*PROMPT, 32], Budget(3, 3))) == 1
    (notice,) = hear(remote, 1)
    model.gate.set()
    assert "no reply has come for 1 seconds" in notice
    drafter.close()
    remote.close()
    server.close()


def answer(engine: Engine, spec: Speculation, n: int = 60) -> Finished:
    engine.speculation = spec
    *_, finished = engine.stream(Request("the rain in", SamplingParams(temperature=0), n))
    assert isinstance(finished, Finished)
    return finished


def test_a_server_that_is_lost_and_comes_back_within_an_answer() -> None:
    server = DraftServer(load_letters)
    remote = server.connect()
    engine = open_engine(remote)
    wanted = answer(engine, Speculation(), 200).tokens
    engine.speculation = REMOTE
    events = engine.stream(Request("the rain in", SamplingParams(temperature=0), 200))
    steps: list[Step] = []
    notices: list[str] = []

    def run(is_done: Callable[[], bool]) -> None:
        for event in events:
            if isinstance(event, Notice):
                notices.append(event.text)
            elif isinstance(event, Finished):
                assert event.tokens == wanted
            elif isinstance(event, Step):
                steps.append(event)
                if is_done():
                    return

    run(lambda: len(steps) == 5)
    assert any(step.n_drafted for step in steps)
    server.close()
    run(lambda: len(steps) == 15)
    assert not any(step.n_drafted for step in steps[7:]), "plainly meanwhile"
    again = DraftServer(load_letters, port=server.port)

    def is_back() -> bool:
        time.sleep(0.05)
        return steps[-1].n_drafted > 0

    run(is_back)
    assert steps[-1].n_drafted, "it is used again"
    run(lambda: False)
    (notice,) = notices
    assert notice.startswith(f"The drafter remote has no connection to {server.url}: ")
    engine.release_draft()
    again.close()


@pytest.mark.parametrize("guesses", [0, 1, 6])
def test_texts_are_those_of_plain_decoding(guesses: int) -> None:
    """With a draft that is right at every token, and one that is not."""
    for noise in (0.0, 1.0):
        server = DraftServer(lambda noise=noise: load_letters(noise))  # type: ignore[misc]
        engine = open_engine(server.connect(guesses=guesses))
        plain, drafted = answer(engine, Speculation()), answer(engine, REMOTE)
        assert drafted.tokens == plain.tokens
        assert drafted.metrics.accepted_tokens > (40 if noise == 0 else 5)
        engine.release_draft()
        server.close()
