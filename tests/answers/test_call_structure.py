"""Forced tool calls as structures, in the format of each family."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from edgespec.answers.call_structure import build_call_structure
from edgespec.answers.generation_spec import GenerationSpec
from edgespec.answers.response import Done, ResponseStream, Started, TextDelta, merge_deltas
from edgespec.answers.tools import Tool
from edgespec.autopilot.speculation import Speculation
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.core.metrics import Meter
from edgespec.core.protocols import Step
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine.events import Finished
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.engine.grammar_mask import GrammarMask
from edgespec.engine.model_info import ModelInfo
from edgespec.engine.structure import Structure, json_structure
from edgespec.models.registry import SamplingDefaults
from edgespec.server.openai import ChatRequest
from edgespec.server.responses import ResponsesRequest
from edgespec.text.call_writer import write_calls
from edgespec.text.chat_template import profile_template
from edgespec.text.readers import make_reader
from edgespec.text.stream import Piece
from edgespec.text.tool_calls import CallDelta, CallEnd, CallStart, ToolCall
from edgespec.text.writing import DESCRIBED
from tests.text.templates import FAMILIES

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

MODEL_INFO = ModelInfo("m", "toy", {}, SamplingDefaults(), None, None, None, 64, Speculation(), False, (), 1, None)


class Place(BaseModel):
    city: str


class Ask(BaseModel):
    place: Place


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(load("tree", LoadOptions()).tokenizer)) as made:
        yield made


SEVERAL = set(FAMILIES) - {"harmony"}


def write(family: str, *arguments: dict[str, Any]) -> str:
    """What the model writes from the beginning of an answer to call a tool so many times."""
    calls = [{"id": "abcdefghi", "function": {"name": "weather", "arguments": each}} for each in arguments]
    return write_calls(profile_template(FAMILIES[family]).calls, calls)


def follow(compiler: GrammarCompiler, structure: Structure, text: str) -> bool:
    """Whether the grammar lets this text through, followed token by token, and wants no more after it."""
    tokenizer = load("tree", LoadOptions()).tokenizer
    mask = GrammarMask(compiler.compile(structure).result(), Sampler(SamplingParams(), tokenizer.vocab_size), 0)
    is_let = mask._follow(tokenizer.encode(text, parse_special=False))
    return is_let and bool(set(tokenizer.end_of_generation) & {*mask._allowed().nonzero()[0].tolist()})


def read(family: str, text: str, tools: Sequence[Tool]) -> tuple[list[ToolCall], str]:
    reader = make_reader(profile_template(FAMILIES[family]).calls, {tool.name: tool.parameters for tool in tools})
    found = [*reader.push(text), *reader.finish()]
    calls = [each.call for each in found if isinstance(each, CallEnd)]
    return calls, "".join(each for each in found if isinstance(each, str))


@pytest.mark.parametrize("parallel_calls", [False, True])
@pytest.mark.parametrize("cities", [("Oslo",), ("Oslo", "Rome", "Lima")], ids=["one", "three"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_are_read_back(
    family: str, cities: tuple[str, ...], parallel_calls: bool, compiler: GrammarCompiler
) -> None:
    tool = Tool("weather", "", Ask.model_json_schema())
    form = profile_template(FAMILIES[family]).calls
    structure = build_call_structure(form, [tool], parallel_calls=parallel_calls)
    arguments = [{"place": {"city": city}} for city in cities]
    text = write(family, *arguments)
    if len(cities) > 1 and not (parallel_calls and family in SEVERAL):
        assert not follow(compiler, structure, text), "one call was asked for"
        return
    assert follow(compiler, structure, text), "the grammar refuses what the family writes"
    calls, said = read(family, text, [tool])
    assert [call.name for call in calls] == ["weather"] * len(cities) and not said.strip()
    assert [json.loads(call.arguments) for call in calls] == arguments


@pytest.mark.parametrize("family", FAMILIES)
def test_a_structured_answer_may_be_a_call_where_there_are_tools(family: str, compiler: GrammarCompiler) -> None:
    """As agents ask whose last answer has a schema."""
    tool = Tool("weather", "", Ask.model_json_schema())
    spec = GenerationSpec("hello", structure=json_structure({"const": {"done": True}}), tools=(tool,))
    profile = profile_template(FAMILIES[family])
    structure = spec.build_request(replace(MODEL_INFO, template=profile), token_limit=50).structure
    assert structure is not None
    said = profile.header + '{"done": true}'
    called = write(family, {"place": {"city": "Oslo"}})
    for text, is_let in ((called, True), (said, True), ('{"done": false}', False), ("Well.", False)):
        assert follow(compiler, structure, text) == is_let, text
    assert read(family, said, [tool]) == ([], '{"done": true}')


TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"}, "unit": {"enum": ["C", "F"]}, "n": {"type": "integer"}, "x": {"type": "number"},
        "b": {"type": "boolean"}, "list": {"type": "array", "items": {"type": "integer"}},
        "o": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
        "ref": {"$ref": "#/$defs/d"},
    },
    "required": ["s", "unit", "n", "b"],
    "$defs": {"d": {"enum": ["left", "right"]}},
}  # fmt: skip
WHOLE = {"s": "a b", "unit": "C", "n": 3, "x": 1.5, "b": True, "list": [1, 2], "o": {"k": "v"}, "ref": "left"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_follows_the_schema_of_its_tool(family: str, compiler: GrammarCompiler) -> None:
    tool = Tool("weather", "", TYPED)
    structure = build_call_structure(profile_template(FAMILIES[family]).calls, [tool])
    for arguments in (WHOLE, {key: WHOLE[key] for key in TYPED["required"]}):
        assert follow(compiler, structure, write(family, arguments)), arguments
        (call,), _ = read(family, write(family, arguments), [tool])
        assert json.loads(call.arguments) == arguments
    for wrong in ({"unit": "K"}, {"n": "x"}, {"b": 3}, {"ref": "up"}, {"more": 1}):
        assert not follow(compiler, structure, write(family, WHOLE | wrong)), wrong
    assert not follow(compiler, structure, write(family, {"s": "a"})), "keys are missing"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_forced_call_without_arguments_ends(family: str, parameters: Any, compiler: GrammarCompiler) -> None:
    tool = Tool("weather", "", parameters)
    structure = build_call_structure(profile_template(FAMILIES[family]).calls, [tool])
    assert follow(compiler, structure, write(family, {}))
    assert not follow(compiler, structure, write(family, {"a": 1}))
    assert read(family, write(family, {}), [tool])[0] == [ToolCall("weather", "{}")]


def test_a_length_of_drafts_needs_a_drafter() -> None:
    finished = Finished("stop", (), 0, Meter(7, 0.0).metrics())
    for draft_max, told in ((3, ("draft_max needs a drafter.",)), (0, ()), (None, ())):
        (*_, done) = GenerationSpec("x", draft_max=draft_max).make_response(MODEL_INFO).parts(finished)
        assert isinstance(done, Done) and done.warnings == told


@pytest.mark.parametrize("family", FAMILIES)
def test_a_strict_tool_that_may_be_called(family: str, compiler: GrammarCompiler) -> None:
    """A format that marks its calls has them enforced behind the mark; another has a warning."""
    function = {"name": "weather", "parameters": Ask.model_json_schema(), "strict": True}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
    }
    spec = ChatRequest.model_validate(body).generation_spec()
    model_info = replace(MODEL_INFO, template=profile_template(FAMILIES[family]))
    request = spec.build_request(model_info, token_limit=64)
    (done,) = [*spec.make_response(model_info).parts(Finished("stop", (), 0, Meter(7, 0.0).metrics()))][1:]
    assert isinstance(done, Done)
    warnings = [each for each in done.warnings if "strict" in each]
    if request.opening is None or request.structure is None:
        assert family in {"llama", "harmony", "functionary"}
        assert warnings == ["the tool 'weather' is strict only where a call is demanded."]
        return
    text = write(family, {"place": {"city": "Oslo"}})
    assert not warnings and text.lstrip().startswith(request.opening)
    behind = text.lstrip().removeprefix(request.opening)
    assert follow(compiler, request.structure, behind)
    assert not follow(compiler, request.structure, behind.replace("city", "town"))


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
    for i in range(1, 12):
        meter.add(Step(i, (1, 2, 3), 4, 2, 3, at_s=11.0 + i, plain_steps=2.0))
    timings = Done("stop", None, meter.metrics()).timings()
    speeds = [timings[name] for name in ("predicted_per_second", "plain_per_second", "speedup")]
    assert speeds == pytest.approx([3.0, 2.0, 1.5])


def test_no_more_calls_than_sixteen(compiler: GrammarCompiler) -> None:
    tool = Tool("f", "", {"type": "object", "additionalProperties": False})
    tokenizer = load("tree", LoadOptions()).tokenizer
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    for n, is_let in ((16, True), (17, False)):
        structure = build_call_structure(DESCRIBED, [tool], parallel_calls=True)
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
    reader = make_reader(DESCRIBED, {tool.name: tool.parameters for tool in spec.tools})
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
    response = ResponseStream(make_reader(DESCRIBED, {name: {} for name in names}), demanded=names)
    metrics = Meter(1, 0.0).metrics()
    pieces = [part for character in text for part in response.parts(Piece(character, "answer", ""))]
    *parts, end = merge_deltas([*pieces, *response.parts(Finished("length", (), 0, metrics))])
    assert [part for part in parts if not isinstance(part, Started)] == expected
    assert isinstance(end, Done) and end.reason == "length"


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
