"""The messages that the bodies of all interfaces become: turns, parts, and results of tools."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from edgespec.server.anthropic import MessagesRequest
from edgespec.server.fields import GenerationBody
from edgespec.server.ollama import OllamaChatRequest
from edgespec.server.openai import ChatRequest
from edgespec.server.responses import ResponsesRequest
from edgespec.text.chat_template import Message

CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "a"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}


def read_items(*items: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """The messages after the user's: role, text, and what else they have."""
    body = {"model": "m", "input": [{"role": "user", "content": "x"}, *items]}
    prompt = ResponsesRequest.model_validate(body).generation_spec().prompt
    assert isinstance(prompt, tuple)
    return [(message.role, message.content, dict(message.extra)) for message in prompt[1:]]


@pytest.mark.parametrize("items", [*permutations([THOUGHT, ANSWER, CALL])], ids=lambda items: items[0]["type"])
def test_a_turn_of_responses_is_one_message(items: tuple[dict[str, Any], ...]) -> None:
    """As OpenAI's clients send it back: Codex with the text of the reasoning, others with a summary or nothing."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    turn = ("assistant", "Wait.", {"tool_calls": [call], "reasoning_content": "Hm."})
    result = ("tool", "a", {"tool_call_id": "1"})
    assert read_items(*items, RESULT) == [turn, result]
    assert read_items(*items, RESULT, *items) == [turn, result, turn]


def test_reasoning_of_responses() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}], "content": None}
    assert read_items(summary, ANSWER) == [("assistant", "Wait.", {"reasoning_content": "Short."})]
    assert read_items({"type": "reasoning", "encrypted_content": "?"}) == []
    assert read_items(THOUGHT, {"role": "user", "content": "y"}, ANSWER) == [
        ("assistant", "", {"reasoning_content": "Hm."}),
        ("user", "y", {}),
        ("assistant", "Wait.", {}),
    ]


@pytest.mark.parametrize("arguments", ["", None])
def test_calls_of_the_history_without_arguments(arguments: str | None) -> None:
    """A call that max_tokens has cut comes back so."""
    ((_, _, extra),) = read_items({**CALL, "arguments": arguments})
    function = {"name": "f", "arguments": arguments}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": function}]}]
    spec = ChatRequest.model_validate({"model": "m", "messages": chat}).generation_spec()
    assert isinstance(spec.prompt, tuple)
    for (call,) in (extra["tool_calls"], spec.prompt[1].extra["tool_calls"]):
        assert call["function"]["arguments"] == {}


RESULT_PARTS = [
    {"type": "text", "text": "See"}, {"type": "image"}, {"type": "document"}, {"type": "text", "text": "it."},
]  # fmt: skip
LEFT_OUT = "See\n[image left out: the model reads text only]\n[document left out: the model reads text only]\nit."
WITH_IMAGES: list[tuple[type[GenerationBody], dict[str, Any]]] = [
    (ChatRequest, {"messages": [{"role": "tool", "tool_call_id": "1", "content": RESULT_PARTS}]}),
    (ResponsesRequest, {"input": [{**RESULT, "output": RESULT_PARTS}]}),
    (MessagesRequest, {"max_tokens": 3, "messages": [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": RESULT_PARTS}]}]}),
    (OllamaChatRequest, {"messages": [{"role": "tool", "tool_name": "f", "content": RESULT_PARTS}]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), WITH_IMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_no_text_in_a_result_is_named_and_warned_of(kind: type[GenerationBody], body: dict[str, Any]) -> None:
    spec = kind.model_validate({"model": "m", **body}).generation_spec()
    (message,) = spec.prompt
    assert isinstance(message, Message) and (message.role, message.content) == ("tool", LEFT_OUT)
    assert spec.warnings == tuple(
        f"{kind} content is left out: the model reads text only." for kind in ("image", "document")
    )


@pytest.mark.parametrize("role", ["tool", "user"])
def test_ollama_s_images(role: str) -> None:
    message = {"role": role, "content": "See.", "images": ["aGk="]}
    spec = OllamaChatRequest.model_validate({"model": "m", "messages": [message]}).generation_spec()
    assert spec.prompt[0].content == "See.\n[image left out: the model reads text only]"  # type: ignore[union-attr]
    assert len(spec.warnings) == 1


PARTS = [{"type": "text", "text": text} for text in ("Read this:", "", "a\n", "b")]
IN_PARTS: list[tuple[type[GenerationBody], dict[str, Any]]] = [
    *((ChatRequest, {"messages": [{"role": role, "content": PARTS}]}) for role in ("user", "system", "assistant")),
    (ChatRequest, {"messages": [{"role": "tool", "tool_call_id": "1", "content": PARTS}]}),
    (ResponsesRequest, {"input": [{"role": "user", "content": PARTS}]}),
    (ResponsesRequest, {"input": [{**RESULT, "output": PARTS}]}),
    *((MessagesRequest, {"max_tokens": 3, "messages": [{"role": "user", "content": content}]}) for content in (
        PARTS, [{"type": "tool_result", "tool_use_id": "1", "content": PARTS}])),
    (MessagesRequest, {"max_tokens": 3, "system": PARTS, "messages": [{"role": "user", "content": "x"}]}),
    (OllamaChatRequest, {"messages": [{"role": "user", "content": PARTS}]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), IN_PARTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_parts_of_a_message_are_lines(kind: type[GenerationBody], body: dict[str, Any]) -> None:
    first = kind.model_validate({"model": "m", **body}).generation_spec().prompt[0]
    assert isinstance(first, Message) and first.content == "Read this:\na\n\nb"


def test_anthropic_s_blocks_of_the_assistant_are_one_turn() -> None:
    thoughts = [{"type": "thinking", "thinking": text, "signature": ""} for text in ("Hm.", "So.")]
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    turn = {"role": "assistant", "content": [thoughts[0], PARTS[0], thoughts[1], PARTS[3], call]}
    body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}, turn]}
    last = MessagesRequest.model_validate(body).generation_spec().prompt[-1]
    assert isinstance(last, Message) and (last.role, last.content) == ("assistant", "Read this:\nb")
    assert last.extra["reasoning_content"] == "Hm.\nSo." and len(last.extra["tool_calls"]) == 1
