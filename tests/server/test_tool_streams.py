"""Tool calls while they are written, by the streaming helpers of OpenAI's and Anthropic's own clients."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent
from pydantic import BaseModel

from tests.server.serving import PROMPT, Server

USER: list[Any] = [{"role": "user", "content": PROMPT}]
LONG = 1000  # tokens: the toy writes as many blanks as the grammar allows


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]
    days: list[Literal[1, 2, 3]]


SCHEMA = {**Weather.model_json_schema(), "additionalProperties": False}
SCHEMA["properties"]["days"]["maxItems"] = 3
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
RESPONSES_TOOL: Any = {"type": "function", **TOOL["function"]}
ANTHROPIC_TOOL: Any = {"name": "weather", "input_schema": SCHEMA}
DEMAND: dict[str, Any] = {"messages": USER, "tools": [TOOL], "tool_choice": "required", "temperature": 0}


def test_chat(toy: Server) -> None:
    client, model = toy.openai(), "tree"
    whole = client.chat.completions.create(model=model, max_tokens=LONG, **DEMAND).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls
    written = whole.message.tool_calls[0].to_dict()["function"]
    with client.chat.completions.stream(model=model, max_tokens=LONG, **DEMAND) as stream:
        events: list[Any] = [event for event in stream if event.type.startswith("tool_calls")]
        final = stream.get_final_completion().choices[0]
    assert [event.type.rpartition(".")[2] for event in events[-2:]] == ["delta", "done"]
    pieces = [event.arguments_delta for event in events[:-1]]
    assert pieces[0] == "" and "".join(pieces) == written["arguments"]  # type: ignore[index]
    (call,) = final.message.tool_calls or ()
    assert call.function.to_dict()["arguments"] == written["arguments"]  # type: ignore[index]
    assert call.function.name == "weather" and Weather.model_validate_json(call.function.arguments)
    assert call.id.startswith("call_") and final.finish_reason == "tool_calls" and not final.message.content


def test_messages(toy: Server) -> None:
    client, model = toy.anthropic(), "tree"
    ask: dict[str, Any] = {"model": model, "messages": USER, "tools": [ANTHROPIC_TOOL], "temperature": 0}
    ask["tool_choice"] = {"type": "any"}
    (block,) = client.messages.create(max_tokens=LONG, **ask).content
    with client.messages.stream(max_tokens=LONG, **ask) as stream:
        events = list(stream)
        final = stream.get_final_message()
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert json.loads("".join(pieces)) == block.input  # type: ignore[union-attr]
    kinds = [event.type for event in events if event.type not in ("input_json", "content_block_delta")]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    (use,) = final.content
    assert use.type == "tool_use" and use.input == block.input and final.stop_reason == "tool_use"  # type: ignore[union-attr]


def test_responses(toy: Server) -> None:
    client, model = toy.openai(), "tree"
    ask: dict[str, Any] = {"model": model, "input": PROMPT, "tools": [RESPONSES_TOOL], "temperature": 0}
    ask["tool_choice"] = "required"
    with client.responses.stream(max_output_tokens=LONG, **ask) as stream:
        events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    *before, done, item, end = events
    assert [event.type for event in before[:3]] == [
        "response.created", "response.in_progress", "response.output_item.added"
    ]  # fmt: skip
    pieces = [event.delta for event in before[3:]]
    assert "".join(pieces) == done.arguments == item.item.arguments
    assert Weather.model_validate_json(done.arguments) and done.name == "weather"
    assert item.item.status == "completed" and end.response.output[0].arguments == done.arguments
    assert end.type == "response.completed"


def test_logprobs_are_in_the_chunk_of_their_text(pair: Server) -> None:
    client = pair.openai()
    common: dict[str, Any] = {"model": "embedded", "max_tokens": 12, "temperature": 0, "stream": True}
    n_tokens = 0
    for chunk in client.chat.completions.create(messages=USER, logprobs=True, **common):
        choice = chunk.choices[0]
        scores = (choice.logprobs.content or []) if choice.logprobs else []
        assert "".join(score.token for score in scores) == (choice.delta.content or "")
        n_tokens += len(scores)
    assert n_tokens == 12
    at = 0
    for part in client.completions.create(prompt=PROMPT, logprobs=1, **common):
        logprobs, text = part.choices[0].logprobs, part.choices[0].text
        assert "".join(logprobs.tokens or ()) == text if logprobs else not text
        assert not logprobs or (logprobs.text_offset or [])[0] == at
        at += len(text)


def test_a_response_that_fails(toy: Server) -> None:
    """The engine dies amid a call: OpenAI's client raises, and the events are the documented ones."""
    parameters = {"properties": {"numbers": {"type": "array", "items": {"const": 7}, "minItems": 4000}}}
    long = {**RESPONSES_TOOL, "parameters": {"type": "object", "required": ["numbers"], **parameters}}
    body: Any = {"model": "tree", "input": PROMPT, "tools": [long], "tool_choice": "required", "stream": True}
    delta = "response.function_call_arguments.delta"
    with pytest.raises(openai.APIError, match="engine"):
        for event in toy.openai().responses.create(**body):
            if event.type == delta:
                end_engine(toy)
    events = []
    with httpx.stream("POST", f"{toy.url}/v1/responses", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if events[-1]["type"] == delta:
                    end_engine(toy)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    error, failed = events[-2:]
    assert ResponseErrorEvent.model_validate(error, strict=True).message == error["error"]["message"]
    response_failed = ResponseFailedEvent.model_validate(failed).response
    assert response_failed.status == "failed" and response_failed.id == events[0]["response"]["id"]
    assert response_failed.error and response_failed.error.code == "server_error"
    assert response_failed.error.message == error["message"]


def end_engine(server: Server) -> None:
    for engine in server.engines():
        engine.kill()
