"""Anthropic's interface, by its own client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.server.serving import PROMPT, Server

MODEL = "embedded"
USER: list[Any] = [{"role": "user", "content": PROMPT}]
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"],
                     "additionalProperties": False},
}  # fmt: skip


def read(message: Any) -> int:
    """Tokens of the prompt, cached ones included."""
    count: int = message.usage.input_tokens + message.usage.cache_read_input_tokens
    return count


def test_stop_sequences_and_system(pair: Server) -> None:
    client = pair.anthropic()
    made = client.messages.create(model=MODEL, max_tokens=24, messages=USER, temperature=0, stop_sequences=["\n"])
    assert made.stop_reason == "stop_sequence" and made.stop_sequence == "\n"
    assert read(made) == client.messages.count_tokens(model=MODEL, messages=USER).input_tokens
    system = client.messages.count_tokens(model=MODEL, messages=USER, system="import os\n")
    blocks = client.messages.count_tokens(model=MODEL, messages=USER, system=[{"type": "text", "text": "import os\n"}])
    assert (
        system == blocks and system.input_tokens > client.messages.count_tokens(model=MODEL, messages=USER).input_tokens
    )


def test_a_system_message_amid_a_conversation(pair: Server) -> None:
    """As Claude Code sends it, in its beta mid-conversation-system."""
    client = pair.anthropic()
    note: Any = {"role": "system", "content": [{"type": "text", "text": "import os\n"}]}
    counted = client.messages.count_tokens(model=MODEL, messages=[*USER, note])
    made = client.beta.messages.create(model=MODEL, max_tokens=4, messages=[*USER, note])
    assert made.usage.output_tokens and read(made) == counted.input_tokens
    assert counted.input_tokens > client.messages.count_tokens(model=MODEL, messages=USER).input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "named"])
def test_a_tool_round_trip(choice: Any, pair: Server) -> None:
    client = pair.anthropic()
    made = client.messages.create(
        model=MODEL, max_tokens=200, messages=USER, tools=[TOOL], tool_choice=choice, temperature=0
    )
    (use,) = made.content
    assert made.stop_reason == "tool_use" and use.type == "tool_use" and use.name == "get_weather"
    assert isinstance(use.input, dict) and set(use.input) == {"city"}
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Rain."}]}
    turns: list[Any] = [*USER, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL])
    assert read(after) > read(made) and after.usage.cache_read_input_tokens


def test_refusals(pair: Server) -> None:
    client = pair.anthropic()
    with pytest.raises(anthropic.BadRequestError, match="no tools"):
        client.messages.create(model=MODEL, max_tokens=5, messages=USER, tool_choice={"type": "any"})
    response = pair.post("/v1/messages", json={"model": MODEL, "messages": USER})
    assert response.status_code == 400 and response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
