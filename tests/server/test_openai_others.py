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
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset and choice.logprobs.text_offset[0] == 0
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or ())
    streamed = client.completions.create(model=MODEL, prompt=[PROMPT], max_tokens=10, temperature=0, stream=True)
    assert PROMPT + "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    assert client.completions.create(model=MODEL, prompt=PROMPT).usage.completion_tokens <= 16  # type: ignore[union-attr]
    for refused, why in (
        ({"suffix": "x"}, "no markers for a suffix"),
        ({"suffix": "x", "prompt": [1, 2]}, "suffix needs a prompt as text"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"prompt": [1, 99_999_999]}, "prompt of token ids has ids below"),
        ({"prompt": [1, 2], "echo": True}, "echo of token ids needs logprobs"),
        ({"prompt": ["x"] * 100, "n": 2}, "more than 128 answers"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            client.completions.create(**{"model": MODEL, "prompt": PROMPT, **refused})  # type: ignore[arg-type]


def test_scores_of_the_prompt(pair: Server) -> None:
    """As programs ask that compare the likelihoods of texts: a token's score is the one that it has when generated."""
    client = pair.openai()
    common: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 2, "echo": True}
    made = client.completions.create(prompt=PROMPT, max_tokens=6, **common).choices[0]
    assert made.logprobs and made.logprobs.tokens and made.logprobs.token_logprobs and made.logprobs.top_logprobs
    assert None not in made.logprobs.token_logprobs  # this model's texts begin with a token that is not shown
    assert "".join(made.logprobs.tokens) == made.text and made.text.startswith(PROMPT)
    assert made.logprobs.text_offset and made.logprobs.text_offset[:2] == [0, len(made.logprobs.tokens[0])]
    again = client.completions.create(prompt=made.text, max_tokens=1, **common).choices[0]
    assert again.logprobs and again.logprobs.token_logprobs and again.logprobs.tokens
    n = len(made.logprobs.tokens)
    if again.logprobs.tokens[:n] == made.logprobs.tokens:
        assert again.logprobs.token_logprobs[:n] == pytest.approx(made.logprobs.token_logprobs, abs=0.05)
    streamed = list(client.completions.create(prompt=PROMPT, max_tokens=6, stream=True, **common))
    assert "".join(chunk.choices[0].text for chunk in streamed) == made.text
    tokens = [token for chunk in streamed if (found := chunk.choices[0].logprobs) for token in found.tokens or ()]
    assert tokens == made.logprobs.tokens


def test_several_prompts_and_token_ids(pair: Server) -> None:
    client = pair.openai()
    common: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    prompts = [PROMPT, "import os\n", "x = [1,"]
    alone = [client.completions.create(prompt=each, **common) for each in prompts]
    together = client.completions.create(prompt=prompts, **common)
    assert [choice.text for choice in together.choices] == [made.choices[0].text for made in alone]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    counts = [made.usage.prompt_tokens for made in alone if made.usage]
    assert together.usage and together.usage.prompt_tokens == sum(counts)
    twice = client.completions.create(prompt=prompts[:2], n=2, **common)
    assert [choice.text for choice in twice.choices] == [made.choices[0].text for made in alone[:2] for _ in range(2)]
    assert twice.usage and twice.usage.prompt_tokens == sum(counts[:2])
    ids: Any = [[5, 6, 7, 8], [9, 10, 11]]
    scored = client.completions.create(prompt=ids, echo=True, logprobs=1, **common)
    for choice, given in zip(scored.choices, ids, strict=True):
        assert choice.logprobs and choice.logprobs.token_logprobs and choice.logprobs.tokens
        assert choice.logprobs.token_logprobs[0] is None and None not in choice.logprobs.token_logprobs[1:]
        assert len(choice.logprobs.tokens) == len(given) + 6 and choice.text == "".join(choice.logprobs.tokens)
    one = client.completions.create(prompt=ids[0], **common)
    assert scored.choices[0].text.endswith(one.choices[0].text)


def test_stop_beside_structures(pair: Server) -> None:
    """A stop string ends an answer with a schema; a call that must be made is made."""
    client = pair.openai()
    schema = {"type": "object", "properties": {"size": {"const": 17}}, "required": ["size"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    made = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=99, temperature=0, response_format=form, stop=['size"']
    ).choices[0]
    assert made.finish_reason == "stop" and "".join((made.message.content or "").split()) == '{"'
    called = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_tokens=200,
        temperature=0,
        tools=[WEATHER],
        tool_choice="required",
        stop=["city"],
    ).choices[0]
    assert called.finish_reason == "tool_calls" and called.message.tool_calls


def test_responses(pair: Server) -> None:
    client = pair.openai()
    made = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=20, temperature=0)
    assert made.output_text and made.status == "incomplete"
    assert made.incomplete_details and made.incomplete_details.reason == "max_output_tokens"
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


def test_functions_in_a_namespace(pair: Server) -> None:
    """The model calls them by a longer name; a call and its history have name and namespace, as Codex reads them."""
    client = pair.openai()
    city = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"type": "function", "name": "get_weather", "parameters": city}
    ask: Any = {
        "model": MODEL,
        "tools": [{"type": "namespace", "name": "maps", "description": "Places.", "tools": [function]}],
        "tool_choice": "required",
        "temperature": 0,
        "max_output_tokens": 60,
    }
    called = client.responses.create(input=PROMPT, **ask)
    (call,) = called.output
    assert call.type == "function_call" and (call.name, call.namespace) == ("get_weather", "maps")
    assert json.loads(call.arguments) == {"city": "Rome"}
    asked: Any = {"role": "user", "content": PROMPT}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    by_name: Any = {**call.model_dump(exclude_none=True), "name": "maps__get_weather"}
    del by_name["namespace"]
    after, same = (
        client.responses.create(input=[asked, each, result], **ask)
        for each in (call.model_dump(exclude_none=True), by_name)
    )
    assert called.usage and after.usage and same.usage
    assert after.usage.input_tokens == same.usage.input_tokens > called.usage.input_tokens
    ask["tools"][0]["tools"].append({"type": "custom", "name": "patch"})
    with pytest.raises(openai.BadRequestError, match="tools of type 'custom'"):
        client.responses.create(input=PROMPT, **ask)
