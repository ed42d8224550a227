"""The engine: events, stops, cancellation, reuse, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.cancel import iterate
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import AnswerStart, Finished, Request
from edgespec.errors import Cancelled, ContextOverflow, DraftRefused, InvalidRequest
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece
from tests.engine.conftest import PLAIN, eager, generate, list_loaded
from tests.engine.prompts import CODE
from tests.gguf_models import llama

GREEDY = SamplingParams(temperature=0)


def test_events_come_in_order_and_add_up(engine: Engine) -> None:
    engine.speculation = Speculation(("model",), 3, 3)
    began_s = perf_counter()
    events = list(engine.stream(Request(CODE[0], GREEDY, max_tokens=30)))
    took_s = perf_counter() - began_s
    kinds = [type(event) for event in events]
    assert kinds[0] is PrefillProgress
    assert kinds[-1] is Finished
    steps = [event for event in events if isinstance(event, Step)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert [t for s in steps for t in s.tokens] == list(finished.tokens)
    text = "".join(event.text for event in events if isinstance(event, Piece))
    assert text == b"".join(engine.target.tokenizer.piece(t) for t in finished.tokens).decode()
    drafted = sum(len(e.text) for e in events if isinstance(e, Piece) and e.drafter)
    assert 0 < drafted < len(text)
    m = finished.metrics
    assert m.emitted_tokens == len(finished.tokens) == 30
    assert m.tau == pytest.approx(29 / m.target_forwards)
    assert m.tau is not None and m.tau > 1
    parts = (m.prefill_s, m.draft_s, m.verify_s, m.sample_s, m.commit_s)
    assert min(parts) > 0 and sum(parts) < took_s


@pytest.mark.parametrize("speculation", [PLAIN, Speculation(("model",), 8, 8)], ids=["plain", "model"])
def test_a_stop_string_ends_the_answer_before_it(engine: Engine, speculation: Speculation) -> None:
    engine.speculation = PLAIN
    whole, _ = generate(engine, Request(CODE[0], GREEDY, max_tokens=60))
    stop = whole[len(whole) // 2 :][:5]
    engine.speculation = speculation
    text, finished = generate(engine, Request(CODE[0], GREEDY, max_tokens=60, stop=(stop,)))
    assert finished.reason == "stop"
    assert text == whole[: whole.index(stop)]
    decoded = b"".join(engine.target.tokenizer.piece(t) for t in finished.tokens).decode()
    assert stop in decoded  # the metrics count what was decoded up to the stop, and nothing beyond
    assert finished.metrics.emitted_tokens == len(finished.tokens)


@pytest.mark.parametrize(
    "speculation", [Speculation(("model",), 3), Speculation(("ngram",), 4), Speculation(("ngram", "model"))]
)
def test_drafting_stops_and_goes_on_at_a_word(engine: Engine, speculation: Speculation) -> None:
    request = Request(CODE[1], GREEDY, max_tokens=60)
    engine.speculation = PLAIN
    expected = generate(engine, request)[1].tokens
    engine.speculation, engine.draft_stats = speculation, eager()
    switches = {10: True, 30: False}  # tokens emitted: whether drafting is off from then on
    tokens: list[int] = []
    drafted: dict[bool, int] = {True: 0, False: 0}
    was_off = False
    for event in engine.stream(request):
        if isinstance(event, Step):
            drafted[was_off] += event.n_drafted
            tokens += event.tokens
            assert not was_off or event.decision is None or event.decision.drafter == "none"
            for count, is_off in switches.items():
                if len(tokens) >= count:
                    engine.is_paused = is_off
            was_off = engine.is_paused
    assert tuple(tokens) == expected
    assert drafted[True] == 0 < drafted[False]
    assert not engine.is_paused


def test_cancel_keeps_the_text_and_the_engine(engine: Engine) -> None:
    engine.speculation = Speculation(("model",), 3, 3)
    expected, _ = generate(engine, Request(CODE[2], GREEDY, max_tokens=40))
    cancelled = False

    def check() -> None:
        if cancelled:
            raise Cancelled

    pieces = []
    for event in iterate(engine.stream(Request(CODE[2], GREEDY, max_tokens=40)), check):
        if isinstance(event, Piece):
            pieces.append(event.text)
            cancelled = len(pieces) > 3
        if isinstance(event, Finished):
            assert event.reason == "cancelled"
    text = "".join(pieces)
    assert text and expected.startswith(text) and text != expected
    assert generate(engine, Request(CODE[2], GREEDY, max_tokens=40))[0] == expected


def test_refusals_are_sentences(engine: Engine) -> None:
    for request, error in (
        (Request(""), InvalidRequest),
        (Request(()), InvalidRequest),
        (Request("x = 1\n" * 5000), ContextOverflow),
        (Request("x", max_tokens=-1), InvalidRequest),
        (Request("x", SamplingParams(logit_bias=((5000, 1.0),))), InvalidRequest),
    ):
        with pytest.raises(error) as caught:
            list(engine.stream(request))
        assert caught.value.message.endswith(".")
    assert generate(engine, Request("x", GREEDY, max_tokens=2))[1].reason == "length"


def test_a_prompt_may_only_be_read(engine: Engine) -> None:
    """Into the cache, which the next request finds."""
    text, finished = generate(engine, Request("import os\nimport sys\n", GREEDY, max_tokens=0))
    metrics = finished.metrics
    assert (text, finished.reason, metrics.emitted_tokens, metrics.ttft_s) == ("", "length", 0, None)
    assert metrics.prefill_s > 0
    again = generate(engine, Request("import os\nimport sys\n", GREEDY, max_tokens=1))[1].metrics
    assert again.cached_tokens == again.prompt_tokens


def test_a_draft_with_another_vocabulary_is_refused_with_the_reason(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    llama(path)
    _spoil_token(path, b"return")
    draft = open_model("llamacpp", path, LoadOptions(threads=1))
    with pytest.raises(DraftRefused, match=r"token \d+ is 'return' in the target and 'retorn' in the draft"):
        Engine(engine.target, list_loaded(model=draft), PLAIN)
    draft.close()


def _spoil_token(path: Path, text: bytes) -> None:
    """Rename the vocabulary entry `text`, its letter u to o, in place."""
    data = path.read_bytes()
    entry = len(text).to_bytes(8, "little") + text
    assert data.count(entry) >= 1
    path.write_bytes(data.replace(entry, entry.replace(b"u", b"o"), 1))


def test_a_closed_engine_has_freed_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = (open_model("toy", Path(name), LoadOptions()) for name in ("tree", "draft"))
    freed: list[object] = []
    for model in (target, draft):
        monkeypatch.setattr(model, "close", partial(freed.append, model))
    engine = Engine(target, list_loaded(model=draft), PLAIN)
    generate(engine, Request("x", GREEDY, max_tokens=2))
    engine.close()
    assert freed == [draft, target]


@pytest.mark.parametrize(
    "template", ["", "<{{ messages[0].content }}>{# <think></think> #}", "{{ messages[0].content }}<think>"]
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_cut_answer_is_gone_on_with(template: str, temperature: float) -> None:
    """Two parts are the whole answer, with a template or without, in its reasoning and after it."""
    target = open_model("toy", Path("tree"), LoadOptions())
    target.chat_template = template or None  # type: ignore[misc]
    engine = Engine(target, [], PLAIN)
    bias = ((256, -1000.0),)  # it does not end by itself
    request = Request((Message("user", "hi"),), SamplingParams(temperature=temperature, logit_bias=bias), 60, seed=3)

    def answer(request: Request) -> tuple[str, str]:
        pieces = [event for event in engine.stream(request) if isinstance(event, Piece)]
        reasoning = "".join(piece.text for piece in pieces if piece.channel == "reasoning")
        return reasoning, "".join(piece.text for piece in pieces if piece.channel == "answer")

    whole = answer(request)
    assert bool(whole[0]) == template.endswith("<think>") and len("".join(whole)) == 60
    reasoning, text = answer(replace(request, max_tokens=25))
    rest = answer(replace(request, max_tokens=35, start=AnswerStart(text, reasoning)))
    assert (reasoning + rest[0], text + rest[1]) == whole
    thought = answer(replace(request, start=AnswerStart("", "why")))
    assert not thought["think" in template], "the model is in its reasoning still, if it has any"
