"""A limit of the reasoning: where it ends, what follows, and that the distribution is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.autopilot.fixed import FixedLength
from edgespec.autopilot.speculation import Speculation
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import ByteTokenizer
from edgespec.core.protocols import NO_DRAFT, Budget, Controller
from edgespec.core.sampling import Distribution, SamplingParams
from edgespec.core.scores import HostScores
from edgespec.core.verify import BlockVerification, SampleMatching, TokenRejection
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request, Scored
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.engine.steering import ReasoningLimit
from edgespec.engine.structure import Json, Structure
from edgespec.text.chat_template import Message
from edgespec.text.reasoning import detect_format
from edgespec.text.stream import Piece, TextStream
from tests.core.enumerate import PROMPT, Enumerated, Rule, Table, Target, Tokens, deterministic
from tests.core.enumerated_drafters import Drawn, Fixed
from tests.core.test_exact_loop import generated
from tests.engine.conftest import PLAIN, list_loaded

FORMAT = detect_format("<|channel> <channel|>")  # blocks that may begin anywhere
WORDS = ("a", "<channel|>", "<|channel>thought\n")


class Words(ByteTokenizer):
    """Three tokens: the markers, and a letter."""

    vocab_size = 3
    end_of_generation = frozenset()

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        return [WORDS.index(text)]

    def piece(self, token: int) -> bytes:
        return WORDS[token].encode()


def expected(target: Target, budget: int, length: int) -> dict[Tokens, Fraction]:
    """All texts of `length` tokens by the definition: no more than `budget` letters between markers, then the end."""

    def below(text: Tokens, weight: Fraction, is_open: bool, left: int) -> dict[Tokens, Fraction]:
        if len(text) == length:
            return {text: weight}
        if is_open and left == 0:
            return below((*text, 1), weight, False, 0)
        found: dict[Tokens, Fraction] = {}
        for token, p in enumerate(target.p(PROMPT + text)):
            if p:
                spent = is_open and token != 1  # an opening inside of a block is text
                inside = (is_open or token == 2) and token != 1
                found |= below((*text, token), weight * p, inside, left - spent)
        return found

    return below((), Fraction(1), True, budget)


def limited(rule: Rule, budget: int) -> Rule:
    """The prompt has begun the reasoning."""
    return lambda target, source: ReasoningLimit(
        rule(target, source), TextStream(Words(), (), FORMAT, WORDS[2]), budget, [1]
    )


@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.parametrize("rule", [TokenRejection, BlockVerification])
def test_drawn_drafts_keep_the_distribution(rule: Any, budget: int) -> None:
    target = Target(4)

    def control(source: Enumerated) -> Controller:
        return FixedLength([Drawn(Table(8), source, lambda drawn: False)], Budget(2, 2), 3)

    assert generated(target, limited(rule, budget), control, frozenset(), 3) == expected(target, budget, 3)


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_trees_keep_the_distribution(budget: int) -> None:
    target = Target(3)
    draft = deterministic((2, 0, 0, 2), (-1, 0, 1, -1))(Enumerated())

    def control(source: Enumerated) -> Controller:
        return FixedLength([Fixed(draft)], Budget(3, 4), 3)

    rule: Any = SampleMatching
    assert generated(target, limited(rule, budget), control, frozenset(), 4) == expected(target, budget, 4)


class Script:
    """A target that is certain of the next byte of a text."""

    window, row_params = 10**6, None

    def __init__(self, text: bytes) -> None:
        self.text = text

    def distribution(self, logits: Any, prefix: Sequence[int]) -> Distribution:
        return Distribution(np.array([self.text[len(prefix)]], np.int32), np.ones(1))


@pytest.mark.parametrize(
    ("text", "budget", "reasoning"),
    [("abc</think>de", 9, "abc"), ("abcdef", 3, "abc"), ("ab\u00e9f", 3, "ab\u00e9"), ("abc</think>d", 5, "abc"),
     ("a<<<<<<<<<<<<<<<", 2, "a<<<<<<<<<"), ("abc", 0, "")],
    ids=["shorter", "cut", "within a character", "within the marker", "nearly a marker", "none"],
)  # fmt: skip
def test_where_it_ends(text: str, budget: int, reasoning: str) -> None:
    """What the model has begun is completed, unless it never ends."""
    tokenizer, form = ByteTokenizer(), detect_format("</think>")
    assert form is not None
    verifier: Any = SampleMatching(Script(text.encode()), Enumerated())  # type: ignore[arg-type]
    closing = tokenizer.encode(form.after, parse_special=True)
    limit = ReasoningLimit(verifier, TextStream(tokenizer, (), form, "<think>"), budget, closing)
    written: list[int] = []
    while b"</think>" not in bytes(written):
        written.append(limit.verify(NO_DRAFT, HostScores([np.zeros(256, np.float32)]), written).next_token)
    assert bytes(written).decode() == f"{reasoning}</think>"


@pytest.fixture(scope="module")
def thinker() -> Engine:
    """The toy with a template that begins the reasoning, and a draft that is often right."""
    target, draft = (open_model("toy", Path(name), LoadOptions()) for name in ("tree", "draft"))
    target.chat_template = "{{ messages[0].content }}<think>{# </think> #}"  # type: ignore[misc]
    loaded: list[LoadedDrafter] = list_loaded(model=draft)
    return Engine(target, loaded, PLAIN)


def answer(engine: Engine, request: Request, way: Speculation) -> tuple[str, str, Finished, int]:
    """Reasoning, text, the last event, the number of scores."""
    events = list(engine.generate(request, speculation=way))
    pieces = [event for event in events if isinstance(event, Piece)]
    scores = sum(isinstance(event, Scored) for event in events)
    assert isinstance(events[-1], Finished)
    by_channel = ("".join(p.text for p in pieces if p.channel == each) for each in ("reasoning", "answer"))
    return *by_channel, events[-1], scores  # type: ignore[return-value]


BIAS = ((256, -1000.0),)  # it does not end by itself


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [0, 1, 23])
def test_the_answer_goes_on_as_after_any_text(budget: int, temperature: float, thinker: Engine) -> None:
    """A seed gives the same text with any draft, and after the whole as a prompt; usage and logprobs are complete."""
    sampling = SamplingParams(temperature=temperature, logit_bias=BIAS)
    prompt = (Message("user", "hi"),)
    request = Request(prompt, sampling, 90, seed=3, top_logprobs=0, max_reasoning=budget)
    free = answer(thinker, replace(request, max_reasoning=None), PLAIN)
    plain = answer(thinker, request, PLAIN)
    reasoning, text, finished, n_scores = plain
    assert reasoning == free[0][:budget] and len(text) == 90 - budget - len("</think>")
    assert n_scores == len(finished.tokens) == finished.metrics.emitted_tokens == 90
    drafted = answer(thinker, request, Speculation(("model",), draft_max=5, acceptance="sample"))
    assert drafted[:2] == plain[:2] and drafted[2].metrics.accepted_tokens > 0
    assert drafted[2].metrics.reasoning_tokens == finished.metrics.reasoning_tokens == budget + len("</think>") - 1
    rest = Request(f"hi<think>{reasoning}</think>", sampling, len(text), seed=3)
    assert answer(thinker, rest, PLAIN)[1] == text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_structure_begins_after_it(temperature: float, thinker: Engine) -> None:
    """The answer does not end before it, and drafts change nothing."""
    structure, sampling = Structure((("seven", Json('{"enum": [1, 23]}')),)), SamplingParams(temperature=temperature)
    for seed in range(6):
        request = Request((Message("user", "hi"),), sampling, 90, seed, structure=structure, max_reasoning=30)
        plain = answer(thinker, request, PLAIN)
        assert (len(plain[0]), plain[2].reason) == (30, "stop") and plain[1] in ("seven1", "seven23")
        for way in (
            Speculation(("ngram",), 4),
            Speculation(("model",), 3, None, "sample"),
            Speculation(("model",), 2, 5),
        ):
            assert answer(thinker, request, way)[:2] == plain[:2], way
        drawn = answer(thinker, request, Speculation(("model",), 3, None, "block"))
        assert len(drawn[0]) == 30 and drawn[1] in ("seven1", "seven23")


def test_without_reasoning_nothing_is_limited(thinker: Engine) -> None:
    request = Request("hi<think>", SamplingParams(logit_bias=BIAS), 40, seed=3)
    text = answer(thinker, request, PLAIN)[1]
    assert answer(thinker, replace(request, max_reasoning=0), PLAIN)[1] == text, "raw text has no reasoning"
