"""Calls that have to be made, in the form of each family, as structures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy.model import load
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.server.asking import call_structure
from edgespec.server.dialect import reader_of, tool_format
from edgespec.server.responses import ResponsesRequest
from edgespec.server.tools import Tool
from edgespec.structure import Structures
from edgespec.text.toolcalls import ToolCall


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


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_forced_call_is_read_back(family: str) -> None:
    """What the grammar lets through, followed token by token, is the call that the reader finds."""
    form = tool_format(TEMPLATES[family])
    tool = Tool("weather", "", Ask.model_json_schema())
    structure = call_structure(form, [tool])
    tokenizer = load("tree", LoadOptions()).tokenizer
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    law = Structures(tokenizer).constrain(structure, sampler, 0)
    arguments = {"place": {"city": "Oslo"}}
    before, after = form.frame
    whole = {"name": "weather", form.argument: arguments}
    is_alone = any("{name}" in part for part in before)
    text = "".join(before).replace("{name}", "weather") + json.dumps(arguments if is_alone else whole) + "".join(after)
    tokens = tokenizer.encode(text, parse_special=False)
    assert law._follow(tokens), "the grammar refuses what the family writes"
    assert set(tokenizer.end_of_generation) & set(_allowed(law)), "and wants no more after it"
    reader = reader_of(form, [tool])
    found = [*reader.push(text), *reader.finish()]
    (call,) = [each for each in found if isinstance(each, ToolCall)]
    assert call.name == "weather" and json.loads(call.arguments) == arguments


def _allowed(law: Any) -> list[int]:
    return [int(token) for token in law._allowed().nonzero()[0]]


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
    ask = request.ask()
    assert [tool.name for tool in ask.tools] == ["f"]
    roles = [(message.role, message.content) for message in ask.prompt if not isinstance(message, str)]
    assert roles == [("system", "Be brief.\n\nMore."), ("user", "x"), ("assistant", ""), ("tool", "a"), ("tool", "b")]
    assert len(ask.prompt[2].extra["tool_calls"]) == 2  # type: ignore[union-attr]
