"""Grammars that cannot be compiled in time are refused, and nobody waits for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from subprocess import Popen

import psutil
import pytest

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load as load_toy
from edgespec.cancel import iterate
from edgespec.core.peers import Yield
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.engine.structure import Json, Structure, json_structure
from edgespec.errors import BackendError, Cancelled, InvalidRequest
from edgespec.isolated import Helper
from tests.engine.conftest import PLAIN

TOY = load_toy("tree", LoadOptions(context_size=4096))
SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def hostile(n: int = 1000) -> Structure:
    """19 kB whose compilation takes minutes."""
    patterns = {f"^k{i}_": {"type": "string"} for i in range(n)}
    return Structure(((Json(json.dumps({"type": "object", "patternProperties": patterns})),),))


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(TOY.tokenizer, deadline_s=1.5)) as made:
        yield made


OTHERS: list[psutil.Process] = []


@pytest.fixture(autouse=True)
def others() -> None:
    """Engines that other tests of this process left open have helpers, too."""
    OTHERS.clear()
    OTHERS.extend(helpers())


def helpers() -> list[psutil.Process]:
    """The processes that compile grammars for this test."""
    found = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in found if "grammar_check_main" in " ".join(each.cmdline()) and each not in OTHERS]


def test_a_grammar_is_refused_at_the_deadline(compiler: GrammarCompiler) -> None:
    assert not compiler.compile(json_structure(SMALL)).result().is_error()
    (first,) = helpers()
    with pytest.raises(InvalidRequest, match=r"too complex: its compilation takes more than 1.5 seconds"):
        compiler.compile(hostile()).result()
    assert not first.is_running() and not helpers(), "what compiled it was killed"
    refused = compiler.compile(hostile())
    with pytest.raises(InvalidRequest, match="too complex"):
        refused.result()
    assert not helpers(), "a grammar that was refused is not tried again"
    assert not compiler.compile(json_structure({"const": 1})).result().is_error(), "the helper starts again"
    compiler.close()
    assert not helpers()


def test_a_grammar_is_tried_again_after_a_failure_that_passes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    structure = json_structure(SMALL)

    def fail(_helper: Helper) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Helper, "_begin", fail)
        with pytest.raises(BackendError, match="its compilation cannot be run in a process of its own"):
            compiler.compile(structure).result()
    assert not compiler.compile(structure).result().is_error()

    def end_first(helper: Helper, process: Popen[bytes], question: object) -> None:
        process.kill()
        send(helper, process, question)

    send = Helper._send
    with monkeypatch.context() as patch:
        patch.setattr(Helper, "_send", end_first)
        with pytest.raises(BackendError, match=r"its compilation (ended unexpectedly|cannot be run)"):
            compiler.compile(json_structure({"const": 1})).result()
    assert not compiler.compile(json_structure({"const": 1})).result().is_error()


def test_others_decode_and_callers_leave_while_a_grammar_compiles() -> None:
    engine = Engine(TOY, [], PLAIN, 2)
    engine._grammars = GrammarCompiler(TOY.tokenizer, deadline_s=0.5)
    waiting = engine.generate(Request("a", structure=hostile()))
    other = engine.generate(Request("hello", SamplingParams(temperature=0), 40, seed=1))
    assert isinstance(next(waiting), Yield)
    events = []
    for event in other:
        if isinstance(event, Yield):
            assert isinstance(next(waiting), Yield), "the grammar is still being compiled"
        events.append(event)
    assert isinstance(events[-1], Finished) and sum(isinstance(event, Step) for event in events) > 5
    with pytest.raises(InvalidRequest, match="too complex"):
        list(waiting)
    left = False

    def check() -> None:
        if left:
            raise Cancelled

    leaving = iterate(engine.generate(Request("a", structure=hostile(999))), check)
    assert isinstance(next(leaving), Yield)
    left = True
    (last,) = leaving
    assert isinstance(last, Finished) and last.reason == "cancelled"
    engine.close()
    assert not helpers()
