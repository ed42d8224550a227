"""Every constraint that clients send holds in the answer, is named in `warnings`, or is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from edgespec.text.template_probe import NO_TEMPLATE
from tests.server.serving import PROMPT, Server

USER: list[Any] = [{"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}},
    "required": ["size"],
    "additionalProperties": False,
}
SET = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "uniqueItems": True, "maxItems": 2}
TOLD = ['the schema is not enforced as a whole: Unimplemented keys: ["uniqueItems"].']
GBNF = 'root ::= "say " word\nword ::= "yes" | "no"'
LARK = 'start: "say " WORD\nWORD: /yes|no/'


@pytest.mark.parametrize(
    ("path", "field", "value", "pattern"),
    [
        ("completions", "grammar", GBNF, "say (yes|no)"),
        ("chat/completions", "grammar", LARK, "say (yes|no)"),
        ("chat/completions", "structured_outputs", {"grammar": GBNF}, "say (yes|no)"),
        ("chat/completions", "structured_outputs", {"regex": r"^[ab]{3}/x$"}, "[ab]{3}/x"),
        ("chat/completions", "structured_outputs", {"choice": ["yes", "no/\n"]}, "yes|no/\n"),
        ("chat/completions", "json_schema", SCHEMA, r'\{\s*"size"\s*:\s*[12]\s*\}'),
        ("chat/completions", "structured_outputs", {"json": SCHEMA}, r'\{\s*"size"\s*:\s*[12]\s*\}'),
        ("chat/completions", "structured_outputs", {"json": json.dumps(SCHEMA)}, r'\{\s*"size"\s*:\s*[12]\s*\}'),
        (
            "chat/completions",
            "response_format",
            {"type": "json_object", "schema": SCHEMA},
            r'\{\s*"size"\s*:\s*[12]\s*\}',
        ),
    ],
    ids=["gbnf", "lark", "vllm grammar", "regex", "choice", "schema", "vllm json", "as text", "json_object"],
)
def test_other_servers_constraints(path: str, field: str, value: Any, pattern: str, pair: Server) -> None:
    body = {"model": "embedded", "messages": USER, "prompt": PROMPT, "max_tokens": 200, "seed": 1, field: value}
    answer = pair.post(f"/v1/{path}", json=body).json()
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, text), answer
    assert "warnings" not in answer


def test_what_is_not_enforced_is_named_in_every_interface(pair: Server) -> None:
    chat: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SET}}
    client = pair.openai()
    made = client.chat.completions.create(model="embedded", messages=USER, max_tokens=99, response_format=chat)
    assert made.model_extra and made.model_extra["warnings"] == TOLD
    *_, end = client.chat.completions.create(
        model="embedded", messages=USER, max_tokens=99, response_format=chat, stream=True
    )
    assert end.model_extra and end.model_extra["warnings"] == TOLD
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SET}}
    answered = client.responses.create(model="embedded", input=PROMPT, max_output_tokens=99, text=text)
    assert answered.model_extra and answered.model_extra["warnings"] == TOLD
    chat["json_schema"]["strict"] = text["format"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match=r"uniqueItems.*without strict"):
        client.chat.completions.create(model="embedded", messages=USER, response_format=chat)
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.responses.create(model="embedded", input=PROMPT, text=text)
    function: Any = {"name": "f", "parameters": {"type": "object", "properties": {"a": SET}}}
    tools: Any = [{"type": "function", "function": function}]
    called = client.chat.completions.create(
        model="embedded", messages=USER, tools=tools, tool_choice="required", max_tokens=99
    )
    assert called.model_extra and any("uniqueItems" in each for each in called.model_extra["warnings"])
    function["strict"] = True
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(model="embedded", messages=USER, tools=tools, tool_choice="required")


def test_anthropics_output_format(pair: Server) -> None:
    client = pair.anthropic()
    for schema, told in ((SCHEMA, None), (SET, TOLD)):
        form: Any = {"format": {"type": "json_schema", "schema": schema}}
        made = client.messages.create(model="embedded", max_tokens=150, messages=USER, output_config=form)
        assert made.stop_reason == "end_turn" and made.content[0].type == "text"
        value = json.loads(made.content[0].text)
        assert value["size"] in (1, 2) if told is None else isinstance(value, list)
        assert (made.model_extra or {}).get("warnings") == told


def test_a_web_search_is_not_available(pair: Server) -> None:
    """Agents offer it in every request, so it is no fault, and the answer says that it is missing."""
    tools: Any = [{"type": "web_search"}]
    made = pair.openai().responses.create(model="embedded", input=PROMPT, max_output_tokens=3, tools=tools)
    assert made.model_extra and made.model_extra["warnings"] == ["web_search is not available."]


def test_strict_tools_that_the_model_may_call(pair: Server) -> None:
    """The embedded model repeats the beginning of calls that it has read, not the calls: the grammar writes them."""
    ask: Any = {"role": "user", "content": '<tool_call>\n{"name": "f", "arguments": {"n": 7}}\n</tool_call>\n' * 6}
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    client = pair.openai()
    for is_strict in (False, True):
        tool: Any = {"type": "function", "function": {"name": "resize", "strict": is_strict, "parameters": schema}}
        body: dict[str, Any] = {"model": "embedded", "messages": [ask], "tools": [tool], "temperature": 0}
        answer = client.chat.completions.create(max_tokens=60, **body)
        message = answer.choices[0].message
        assert (answer.model_extra or {})["warnings"] == [NO_TEMPLATE.tools_notice]
        if not is_strict:
            assert not message.tool_calls and "<tool_call>\n<tool_call>" in (message.content or "")
            continue
        first: Any = (message.tool_calls or [])[0].to_dict()["function"]
        assert first["name"] == "resize" and json.loads(first["arguments"])["n"] in (1, 2)
        deltas = [
            call.function.arguments or ""
            for chunk in client.chat.completions.create(max_tokens=60, stream=True, **body)
            for call in (chunk.choices[0].delta.tool_calls if chunk.choices else None) or ()
            if call.index == 0 and call.function
        ]
        assert "".join(deltas) == first["arguments"]  # how many there are depends on the machine
