"""OpenAI's text completions and responses, called with its own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.serving import PROMPT, Server
from tests.server.test_openai import MODEL, USER, WEATHER


def test_completions(pair: Server) -> None:
    client = pair.openai()
    made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10, temperature=0, echo=True, logprobs=2)
    choice = made.choices[0]
    assert choice.text.startswith(PROMPT) and choice.logprobs and choice.logprobs.tokens
    assert PROMPT + "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset and choice.logprobs.text_offset[0] == len(PROMPT)
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or ())
    streamed = client.completions.create(model=MODEL, prompt=[PROMPT], max_tokens=10, temperature=0, stream=True)
    assert PROMPT + "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    assert client.completions.create(model=MODEL, prompt=PROMPT).usage.completion_tokens <= 16  # type: ignore[union-attr]
    for refused, why in (
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"prompt": [1, 2]}, "must be one string"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            client.completions.create(**{"model": MODEL, "prompt": PROMPT, **refused})  # type: ignore[arg-type]


def test_responses(pair: Server) -> None:
    client = pair.openai()
    chat = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=20, temperature=0)
    made = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=20, temperature=0)
    assert made.output_text == chat.choices[0].message.content and made.status == "incomplete"
    assert made.incomplete_details and made.incomplete_details.reason == "max_output_tokens"
    assert made.usage and made.usage.output_tokens == 20
    with client.responses.stream(model=MODEL, input=PROMPT, max_output_tokens=20, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == made.output_text
    tool: Any = {"type": "function", **WEATHER["function"]}
    called = client.responses.create(
        model=MODEL, input=PROMPT, tools=[tool], tool_choice="required", max_output_tokens=200, temperature=0
    )
    (call,) = called.output
    assert call.type == "function_call" and call.name == "get_weather" and "city" in json.loads(call.arguments)
    after = client.responses.create(
        model=MODEL,
        instructions="import os",
        input=[
            {"role": "user", "content": PROMPT},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."},
        ],
        max_output_tokens=8,
    )
    assert after.status in ("completed", "incomplete")
    shaped: Any = {
        "format": {
            "type": "json_schema",
            "name": "x",
            "schema": {"type": "array", "items": {"enum": [7]}, "maxItems": 2},
        }
    }
    listed = client.responses.create(model=MODEL, input=PROMPT, text=shaped, max_output_tokens=200)
    assert listed.status == "incomplete" or set(json.loads(listed.output_text)) <= {7}
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(model=MODEL, input=PROMPT, previous_response_id="resp_1")
