"""The beginning of an answer, given as a last message of the assistant, is continued."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.server.serving import PROMPT, Server

USER: list[Any] = [{"role": "user", "content": PROMPT}]
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
    text = pair.openai().completions.create(prompt=PROMPT + START, **common).choices[0].text
    parts = [{"type": "text", "text": START[:9]}, {"type": "text", "text": START[9:]}]
    for messages in (ended(), [*USER, {"role": "assistant", "content": parts}]):
        made = client.messages.create(messages=messages, **common)
        (block,) = made.content
        assert block.type == "text" and block.text == text
        read = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
        assert client.messages.count_tokens(model="embedded", messages=messages).input_tokens == read
    with pytest.raises(anthropic.BadRequestError, match="ends with white space"):
        client.messages.create(messages=ended(START + " "), **common)
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    with pytest.raises(anthropic.BadRequestError, match="beginning is given"):
        client.messages.create(messages=ended(), output_config=form, **common)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"messages": USER, "continue_final_message": True}, "only a last message of the assistant"),
        ({"messages": ended(), "continue_final_message": True, "add_generation_prompt": True}, "contradict"),
        ({"messages": ended(prefix=True), "continue_final_message": False}, "contradict"),
        ({"messages": [*ended(prefix=True), *USER]}, "prefix belongs to the last message"),
        ({"messages": ended(prefix=True), "response_format": {"type": "json_object"}}, "beginning is given"),
        ({"messages": ended(prefix=True), "tools": [FUNCTION], "tool_choice": "required"}, "beginning is given"),
    ],
    ids=["of the user", "and a prompt", "and not", "elsewhere", "with json", "with a call"],
)
def test_contradictions(change: dict[str, Any], why: str, pair: Server) -> None:
    response = pair.post("/v1/chat/completions", json={"model": "embedded", "max_tokens": 3, **change})
    assert response.status_code == 400 and why in response.json()["error"]["message"], response.text
