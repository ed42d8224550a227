"""Structured answers: always sound, the same with drafts as without, and a masked law for any sampler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from edgespec.autopilot.speculation import Speculation
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load as load_toy
from edgespec.core.protocols import Step
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.engine.grammar_mask import GrammarMask
from edgespec.engine.structure import Grammar, json_part, json_structure, regex_structure
from edgespec.errors import InvalidRequest
from edgespec.text.stream import Piece
from tests.engine.conftest import PLAIN, list_loaded
from tests.engine.prompts import CODE

WAYS = (
    Speculation(("ngram",), 4),
    Speculation(("model",), 3),
    Speculation(("model",), 2, 5),
    Speculation(("ngram", "model")),
)


def answer(engine: Engine, request: Request, speculation: Speculation) -> tuple[str, Finished, list[Step]]:
    engine.speculation = speculation
    events = list(engine.stream(request))
    (finished,) = [event for event in events if isinstance(event, Finished)]
    text = "".join(event.text for event in events if isinstance(event, Piece))
    return text, finished, [event for event in events if isinstance(event, Step)]


def names() -> st.SearchStrategy[str]:
    return st.text("abcdef_", min_size=1, max_size=6)


SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"type": "number"}])
    | st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 8))
    | st.builds(lambda values: {"enum": values}, st.lists(st.integers(0, 99) | names(), min_size=1, max_size=3)),
    lambda inner: st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 2))
    | st.builds(lambda ways: {"anyOf": ways}, st.lists(inner, min_size=1, max_size=2))
    | st.builds(
        lambda fields: {"type": "object", "properties": fields, "required": sorted(fields),
                        "additionalProperties": False},
        st.dictionaries(names(), inner, max_size=3),
    ),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schema=SCHEMAS,
    seed=st.integers(0, 2**31),
    warm=st.booleans(),
    way=st.sampled_from(WAYS),
    prompt=st.sampled_from(CODE),
)
def test_any_schema_is_followed(
    schema: Any, seed: int, warm: bool, way: Speculation, prompt: str, engine: Engine
) -> None:
    request = Request(prompt, SamplingParams(temperature=float(warm)), 150, seed, structure=json_structure(schema))
    text, finished, _ = answer(engine, request, way)
    if finished.reason == "stop":
        Draft202012Validator(schema).validate(json.loads(text))
    else:
        assert finished.reason == "length" and len(finished.tokens) == 150


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(temperature: float) -> None:
    """On the toy, whose scores do not depend on the number of rows to the last bit."""
    options = LoadOptions(context_size=1024)
    engine = Engine(load_toy("tree", options), list_loaded(model=load_toy("draft", options)), PLAIN)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
              "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}, "required": ["name", "sizes"],
              "additionalProperties": False}  # fmt: skip
    params = SamplingParams(temperature=temperature)
    accepted = 0
    for seed, prompt in enumerate(CODE[:8]):
        request = Request(prompt, params, 160, seed, structure=json_structure(schema))
        plain, _, _ = answer(engine, request, PLAIN)
        for way in (*WAYS[:3], Speculation(("model",), 3, None, "sample")):
            text, _, steps = answer(engine, request, way)
            assert text == plain, (prompt, way)
            accepted += sum(step.n_accepted for step in steps)
    assert accepted > 50


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_drafts_follow_the_structure_too(rule: Any, engine: Engine) -> None:
    """These rules ask for laws beyond drafted tokens that the structure forbids."""
    structure, rejected = json_structure({"type": "array", "items": {"enum": [7, 42]}, "maxItems": 4}), 0
    for seed, prompt in enumerate(CODE[:8]):
        request = Request(prompt, SamplingParams(), 80, seed, structure=structure)
        text, finished, steps = answer(engine, request, Speculation(("model",), 3, None, rule))
        rejected += sum(step.n_drafted - step.n_accepted for step in steps)
        assert finished.reason == "length" or set(json.loads(text)) <= {7, 42}, text
    assert rejected > 5


def test_what_is_forced_is_drafted_for_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any drafter a long name costs few forwards."""
    monkeypatch.setattr(engine, "_draft_stats", None)  # measured costs of rows, which limit a draft
    schema = {"const": "a rather long text that leaves no choice at all, written out word by word"}
    request = Request(CODE[0], SamplingParams(temperature=0), 100, structure=json_structure(schema))
    text, finished, steps = answer(engine, request, PLAIN)
    assert json.loads(text) == schema["const"] and finished.reason == "stop"
    assert finished.metrics.target_forwards < len(finished.tokens) / 2
    assert {step.decision.drafter for step in steps if step.n_drafted and step.decision} == {"structure"}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "wrong"}, "cannot be followed: Invalid type: wrong.$"),
        ({"$ref": "http://example.com/schema"}, "cannot be followed: Resource"),
        ({"type": "string", "pattern": "(["}, "cannot be followed: regex parse error: unclosed character class.$"),
        ({"enum": ["x" * 1_100_000]}, "more than 1,048,576 characters"),
        ({"a": {1, 2}}, "cannot be read"),
    ],
    ids=["type", "reference", "pattern", "size", "no JSON"],
)
def test_structures_that_are_refused(schema: Any, told: str, engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        answer(engine, Request(CODE[0], max_tokens=5, structure=json_structure(schema)), PLAIN)
    assert caught.value.message.endswith(".")
    assert answer(engine, Request(CODE[0], max_tokens=5), PLAIN)[1].reason == "length"


def test_nesting_is_bounded() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="nested more than 64 deep"):
        json_part(deep)


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(engine.target.tokenizer)) as made:
        yield made


def mask_of(compiler: GrammarCompiler, schema: Any, sampler: Sampler, start: int = 0) -> GrammarMask:
    return GrammarMask(compiler.compile(json_structure(schema)).result(), sampler, start)


@pytest.fixture
def laws(engine: Engine, compiler: GrammarCompiler) -> Iterator[Any]:
    tokenizer = engine.target.tokenizer

    def distribution(params: SamplingParams, prefix: list[int], logits: Any) -> Any:
        sampler = Sampler(params, tokenizer.vocab_size)
        return mask_of(compiler, {"type": "integer"}, sampler).distribution(logits, prefix)

    yield distribution


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.5, top_k=5), SamplingParams(top_p=0.8),
     SamplingParams(typical_p=0.9), SamplingParams(min_p=0.1),
     SamplingParams(repetition_penalty=1.3, presence_penalty=0.5)],
    ids=["plain", "top-k", "top-p", "typical", "min-p", "penalties"],
)  # fmt: skip
def test_no_sampler_gives_weight_to_what_is_forbidden(params: SamplingParams, laws: Any, engine: Engine) -> None:
    tokenizer = engine.target.tokenizer
    logits = np.random.default_rng(1).standard_normal(tokenizer.vocab_size).astype(np.float32) * 5
    dense = laws(params, tokenizer.encode("1", parse_special=False), logits).dense(tokenizer.vocab_size)
    assert dense.sum() == pytest.approx(1)
    for token in np.flatnonzero(dense):
        piece = tokenizer.piece(int(token))
        assert token in tokenizer.end_of_generation or not piece.strip(b"0123456789.eE \n\t"), piece


def test_a_mask_depends_on_the_prefix_alone(engine: Engine, compiler: GrammarCompiler) -> None:
    """A mask that followed other prefixes before, longer, shorter and forbidden ones, is that of a new follower."""
    tokenizer, rng = engine.target.tokenizer, np.random.default_rng(3)
    words = tokenizer.encode('{"a": 12, "b": [null]}', parse_special=False)
    n = tokenizer.vocab_size
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.9)):
        used = mask_of(compiler, {"type": "object"}, Sampler(params, n), 2)
        answer: list[int] = []
        for _ in range(60):
            answer = answer[: int(rng.integers(len(answer) // 2, len(answer) + 1))]
            answer += words[len(answer) :][: int(rng.integers(1, 5))]
            if rng.random() < 0.2:
                answer += [int(rng.integers(n))]
            logits = rng.standard_normal(n).astype(np.float32) * 4
            new = mask_of(compiler, {"type": "object"}, Sampler(params, n), 2)
            one, other = (each.distribution(logits, [1, 2, *answer]) for each in (used, new))
            assert one.dense(n).tolist() == other.dense(n).tolist()


def test_a_greedy_token_is_the_best_of_those_that_sampling_allows(engine: Engine, compiler: GrammarCompiler) -> None:
    tokenizer, rng = engine.target.tokenizer, np.random.default_rng(4)
    n = tokenizer.vocab_size
    samplers = (Sampler(SamplingParams(temperature=t), n) for t in (0.0, 1.0))
    greedy, sampled = (mask_of(compiler, {"type": "object"}, sampler) for sampler in samplers)
    answer = tokenizer.encode('{"name": [1, "two", null], "b": tr', parse_special=False)
    unmasked = 0
    for i in range(len(answer) + 1):
        for _ in range(5):
            logits = rng.standard_normal(n).astype(np.float32)
            allowed = np.flatnonzero(sampled.distribution(logits, answer[:i]).weights)
            best = greedy.distribution(logits, answer[:i]).token(0)
            assert best == allowed[logits[allowed].argmax()]
            unmasked += best == logits.argmax()
    assert unmasked > 5


@pytest.mark.parametrize(
    ("pattern", "inner"),
    [("ab", "ab"), ("^ab$", "ab"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), (r"^a\\\$$", r"a\\\$"), ("a/b", r"a\/b")],
)
def test_a_regular_expression_loses_its_anchors_and_no_escaped_dollar(pattern: str, inner: str) -> None:
    ((grammar,),) = regex_structure(pattern).alternatives
    assert isinstance(grammar, Grammar) and grammar.lark == f"start: /(?:{inner})/"
