"""Anthropic's interface, through its own client, and answers that begin with given text."""

from __future__ import annotations

from typing import Any

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


def test_a_tool_round_trip(pair: Server) -> None:
    client = pair.anthropic()
    choice: Any = {"type": "tool", "name": "get_weather"}
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


START = "\n    with open(path) as"
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def ended(text: str = START, **more: Any) -> list[Any]:
    return [*USER, {"role": "assistant", "content": text, **more}]


def test_chat(pair: Server) -> None:
    """As the text alone goes on: the embedded model's template has no turns."""
    client = pair.openai()
    common: dict[str, Any] = {"model": "embedded", "max_tokens": 12, "temperature": 0}
    text = client.completions.create(prompt=PROMPT + START, **common).choices[0].text
    for messages, extra in (
        (ended(), {"continue_final_message": True}),
        (ended(), {"continue_final_message": True, "add_generation_prompt": False}),
        (ended(prefix=True), {}),
    ):
        made = client.chat.completions.create(messages=messages, extra_body=extra, **common)
        assert made.choices[0].message.content == text
        stream = client.chat.completions.create(messages=messages, extra_body=extra, stream=True, **common)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_messages(pair: Server) -> None:
    client = pair.anthropic()
    common: dict[str, Any] = {"model": "embedded", "max_tokens": 12, "temperature": 0}
    start = f"{START} file:\n        for"
    text = pair.openai().completions.create(prompt=PROMPT + start, **common).choices[0].text
    first, last = start.rsplit("\n", 1)
    parts = [{"type": "text", "text": first}, {"type": "text", "text": last}]
    for messages in (ended(start), [*USER, {"role": "assistant", "content": parts}]):
        made = client.messages.create(messages=messages, **common)
        (block,) = made.content
        assert block.type == "text" and block.text == text
        read = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
        assert client.messages.count_tokens(model="embedded", messages=messages).input_tokens == read
