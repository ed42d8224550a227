"""Forced tool calls as structures, in the format of each family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.core.metrics import Meter
from edgespec.core.protocols import Step
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.events import Finished
from edgespec.engine.grammar import GrammarCompiler
from edgespec.engine.structured_output import GrammarMask, json_structure
from edgespec.registry.schema import SamplingDefaults
from edgespec.server.openai import ChatRequest
from edgespec.server.responses import ResponsesRequest
from edgespec.service.client import ModelInfo
from edgespec.service.generation_spec import GenerationSpec, Tool, build_call_structure
from edgespec.service.response import Done, ResponseStream, Started, TextDelta, merge_deltas
from edgespec.text.stream import Piece
from edgespec.text.tool_calls import CallDelta, CallEnd, CallStart, ToolCall
from edgespec.text.tool_formats import HERMES, detect_tool_format, make_reader

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

MODEL_INFO = ModelInfo("m", "toy", {}, SamplingDefaults(), None, None, None, 64, Speculation(), False, (), 1, None)


class Place(BaseModel):
    city: str


class Ask(BaseModel):
    place: Place


TEMPLATES = {
    "hermes": "<tool_call>",
    "llama": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral since 2025": "[TOOL_CALLS] [ARGS]",
    "deepseek": "<｜tool▁calls▁begin｜> ```json",  # noqa: RUF001
    "deepseek since v3.1": "<｜tool▁calls▁begin｜>",  # noqa: RUF001
    "harmony": "<|channel|> <|message|> analysis",
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(load("tree", LoadOptions()).tokenizer)) as made:
        yield made


SEVERAL = {"hermes", "mistral", "mistral since 2025", "deepseek", "deepseek since v3.1"}


@pytest.mark.parametrize("parallel_calls", [False, True])
@pytest.mark.parametrize("cities", [("Oslo",), ("Oslo", "Rome", "Lima")], ids=["one", "three"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_forced_calls_are_read_back(
    family: str, cities: tuple[str, ...], parallel_calls: bool, compiler: GrammarCompiler
) -> None:
    """What the grammar lets through, followed token by token, are the calls that the reader finds."""
    form = detect_tool_format(TEMPLATES[family])
    tool = Tool("weather", "", Ask.model_json_schema())
    structure = build_call_structure(form, [tool], parallel_calls=parallel_calls)
    tokenizer = load("tree", LoadOptions()).tokenizer
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    distribution = GrammarMask(compiler.compile(structure).result(), sampler, 0)
    frame = form.frame
    before, after = "".join(frame.before).replace("{name}", "weather"), "".join(frame.after)
    calls = []
    for city in cities:
        arguments: dict[str, Any] = {"place": {"city": city}}
        if not frame.holds_name:
            arguments = {"name": "weather", form.argument: arguments}
        calls.append(before + json.dumps(arguments) + after)
    between = "; " if frame.between is None else "".join(frame.between)
    text = "".join(frame.first) + between.join(calls) + "".join(frame.last)
    tokens = tokenizer.encode(text, parse_special=False)
    if len(cities) > 1 and not (parallel_calls and family in SEVERAL):
        assert not distribution._follow(tokens), "one call was asked for"
        return
    assert distribution._follow(tokens), "the grammar refuses what the family writes"
    assert set(tokenizer.end_of_generation) & set(_allowed(distribution)), "and wants no more after it"
    reader = make_reader(form, {tool.name: tool.parameters})
    found = [*reader.push(text), *reader.finish()]
    read = [each.call for each in found if isinstance(each, CallEnd)]
    assert [call.name for call in read] == ["weather"] * len(cities)
    assert [json.loads(call.arguments) for call in read] == [{"place": {"city": city}} for city in cities]


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_structured_answer_may_be_a_call_where_there_are_tools(family: str, compiler: GrammarCompiler) -> None:
    """As agents ask whose last answer has a schema."""
    form = detect_tool_format(TEMPLATES[family])
    tool = Tool("weather", "", Ask.model_json_schema())
    spec = GenerationSpec("hello", structure=json_structure({"const": {"done": True}}), tools=(tool,))
    model_info = replace(MODEL_INFO, chat_template=TEMPLATES[family])
    structure = spec.build_request(model_info, token_limit=50).structure
    assert structure is not None
    frame = form.frame
    call = '{"place": {"city": "Oslo"}}'
    if not frame.holds_name:
        call = f'{{"name": "weather", "{form.argument}": {call}}}'
    called = "".join((*frame.first, *frame.before, call, *frame.after, *frame.last)).replace("{name}", "weather")
    said = "".join(form.answer_header) + '{"done": true}'
    tokenizer = load("tree", LoadOptions()).tokenizer
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    for text, is_let in ((called, True), (said, True), ('{"done": false}', False), ("Well.", False)):
        matcher = compiler.compile(structure).result()
        distribution = GrammarMask(matcher, sampler, 0)
        assert distribution._follow(tokenizer.encode(text, parse_special=False)) == is_let, text
    reader = make_reader(form, {tool.name: tool.parameters})
    found = [*reader.push(said), *reader.finish()]
    assert "".join(map(str, found)) == '{"done": true}'


def test_a_length_of_drafts_needs_a_drafter() -> None:
    finished = Finished("stop", (), 0, Meter(7, 0.0).metrics())
    for draft_max, told in ((3, ("draft_max needs a drafter.",)), (0, ()), (None, ())):
        (*_, done) = GenerationSpec("x", draft_max=draft_max).make_response(MODEL_INFO).parts(finished)
        assert isinstance(done, Done) and done.warnings == told


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_strict_tool_that_may_be_called(family: str, compiler: GrammarCompiler) -> None:
    """A format that marks its calls has them enforced behind the mark; another has a warning."""
    strict = {"type": "function", "function": {**FUNCTION["function"], "strict": True}}  # type: ignore[dict-item]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [strict]}
    spec = ChatRequest.model_validate(body).generation_spec()
    model_info = replace(MODEL_INFO, chat_template=TEMPLATES[family])
    request = spec.build_request(model_info, token_limit=64)
    (done,) = [*spec.make_response(model_info).parts(Finished("stop", (), 0, Meter(7, 0.0).metrics()))][1:]
    assert isinstance(done, Done)
    if request.opening is None or request.structure is None:
        assert family in {"llama", "harmony"}
        assert done.warnings == ("the tool 'f' is strict only where a call is demanded.",)
        return
    assert not done.warnings
    frame = detect_tool_format(TEMPLATES[family]).frame
    call = "{}" if frame.holds_name else '{"name": "f", "arguments": {}}'
    text = "".join((*frame.first, *frame.before, call, *frame.after, *frame.last)).replace("{name}", "f")
    tokenizer = load("tree", LoadOptions()).tokenizer
    tokens = tokenizer.encode(text.removeprefix(request.opening), parse_special=False)
    sampler = Sampler(SamplingParams(), tokenizer.vocab_size)
    mask = GrammarMask(compiler.compile(request.structure).result(), sampler, 0)
    assert text.startswith(request.opening) and mask.ends(tokens) and not mask.ends(tokens[:-1])


def test_tools_with_a_structure_in_a_request() -> None:
    request = ChatRequest.model_validate({
        "model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [FUNCTION],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    })  # fmt: skip
    structure = request.generation_spec().build_request(MODEL_INFO, token_limit=64).structure
    assert structure is not None and len(structure.alternatives) == 2
    only = (
        request.model_copy(update={"tool_choice": "none"})
        .generation_spec()
        .build_request(MODEL_INFO, token_limit=64)
        .structure
    )
    assert only is not None and len(only.alternatives) == 1


def test_an_answer_that_is_ended_before_it_begins_has_a_beginning() -> None:
    """Anthropic's clients want message_start before anything else."""
    parts = [*ResponseStream(None).parts(Finished("cancelled", (), 0, Meter(7, 0.0).metrics()))]
    assert [type(part) for part in parts] == [Started, Done] and parts[0] == Started(7, 0)


def test_the_timings_of_an_answer_agree() -> None:
    meter = Meter(3, 10.0)
    meter.add(Step(0, (7,), 0, 0, 0, at_s=11.0))
    meter.add(Step(1, (1, 2, 3), 4, 2, 3, at_s=12.0, plain_steps=2.0))
    timings = Done("stop", None, meter.metrics()).timings()
    speeds = [timings[name] for name in ("predicted_per_second", "plain_per_second", "times_plain")]
    assert speeds == pytest.approx([3.0, 2.0, 1.5])


def test_no_more_calls_than_sixteen(compiler: GrammarCompiler) -> None:
    tool = Tool("f", "", {"type": "object", "additionalProperties": False})
    tokenizer = load("tree", LoadOptions()).tokenizer
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    for n, is_let in ((16, True), (17, False)):
        structure = build_call_structure(HERMES, [tool], parallel_calls=True)
        distribution = GrammarMask(compiler.compile(structure).result(), sampler, 0)
        call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        assert distribution._follow(tokenizer.encode("\n".join([call] * n), parse_special=False)) == is_let


@pytest.mark.parametrize("parallel", [True, False, None])
def test_only_the_first_call_is_kept_without_parallel_calls(parallel: bool | None) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"n": %d}}\n</tool_call>'
    text = "Well, " + call % 1 + call % 2 + " so."
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}],
                                          "parallel_tool_calls": parallel, "tools": [FUNCTION]})  # fmt: skip
    spec = request.generation_spec()
    reader = make_reader(HERMES, {tool.name: tool.parameters for tool in spec.tools})
    response = ResponseStream(reader, allow_parallel_calls=spec.parallel_calls is not False)
    metrics = Meter(1, 0.0).metrics()
    parts = [*response.parts(Piece(text, "answer", "")), *response.parts(Finished("stop", (), 0, metrics))]
    calls = [part.call.arguments for part in parts if isinstance(part, CallEnd)]
    assert calls == (['{"n": 1}'] if parallel is False else ['{"n": 1}', '{"n": 2}'])
    assert "".join(part.text for part in parts if isinstance(part, TextDelta)) == "Well,  so."
    assert isinstance(parts[-1], Done) and parts[-1].reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"n": [1', ["f", "g"],
         [CallStart(0, "f"), CallDelta(0, '{"n": [1'), CallEnd(0, ToolCall("f", '{"n": [1'), True)]),
        ('<tool_call>\n{"na', ["f"], [CallStart(0, "f"), CallEnd(0, ToolCall("f", ""), True)]),
        ('<tool_call>\n{"na', ["f", "g"], []),
        ("", ["f"], []),
    ],
    ids=["in its arguments", "before them", "before its name", "before it"],
)  # fmt: skip
def test_a_demanded_call_that_is_cut(text: str, names: list[str], expected: list[Any]) -> None:
    response = ResponseStream(make_reader(HERMES, {name: {} for name in names}), demanded=names)
    metrics = Meter(1, 0.0).metrics()
    pieces = [part for character in text for part in response.parts(Piece(character, "answer", ""))]
    *parts, end = merge_deltas([*pieces, *response.parts(Finished("length", (), 0, metrics))])
    assert [part for part in parts if not isinstance(part, Started)] == expected
    assert isinstance(end, Done) and end.reason == "length"


def _allowed(distribution: Any) -> list[int]:
    bits: list[int] = distribution._allowed().nonzero()[0].tolist()
    return bits


def test_what_codex_sends() -> None:
    """Tools of OpenAI's own are left out, system texts are one message, calls that follow each other one turn."""
    request = ResponsesRequest.model_validate({
        "model": "m", "instructions": "Be brief.", "tools": [{"type": "web_search"}, {"type": "function", "name": "f"}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "More."}]},
            {"role": "user", "content": "x"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
            {"type": "function_call_output", "call_id": "2", "output": "b"},
        ],
    })  # fmt: skip
    spec = request.generation_spec()
    assert [tool.name for tool in spec.tools] == ["f"]
    roles = [(message.role, message.content) for message in spec.prompt if not isinstance(message, str)]
    assert roles == [("system", "Be brief.\n\nMore."), ("user", "x"), ("assistant", ""), ("tool", "a"), ("tool", "b")]
    assert len(spec.prompt[2].extra["tool_calls"]) == 2  # type: ignore[union-attr]
