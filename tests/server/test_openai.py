"""OpenAI's chat interface, called with its own client."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

from tests.server.serving import PROMPT, Server

MODEL = "embedded"
USER: list[Any] = [{"role": "user", "content": PROMPT}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}


def test_models(pair: Server) -> None:
    client = pair.openai()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "edgespec"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here"):
        client.models.retrieve("gpt-4")


def test_chunks(pair: Server) -> None:
    ask: Any = {"model": MODEL, "messages": USER, "max_tokens": 40, "temperature": 0, "stream": True}
    chunks = list(pair.openai().chat.completions.create(**ask, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert not chunks[-1].choices and usage and usage.completion_tokens == 40
    assert usage.prompt_tokens_details and usage.total_tokens == usage.prompt_tokens + 40
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_timings_are_those_of_what_was_emitted(pair: Server) -> None:
    body = pair.ask(MODEL, max_tokens=40).json()
    timings = body["timings"]
    assert timings["predicted_n"] == body["usage"]["completion_tokens"] == 40
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    forwards = 39 / timings["tau"]
    assert forwards == pytest.approx(round(forwards)) and timings["draft_n_accepted"] == 39 - round(forwards)
    assert timings["predicted_ms"] == pytest.approx(39_000 / timings["predicted_per_second"], rel=1e-3)


def test_settings(pair: Server) -> None:
    client = pair.openai()

    def text(**settings: Any) -> str:
        made = client.chat.completions.create(model=MODEL, messages=USER, **{"max_tokens": 24, **settings})
        return made.choices[0].message.content or ""

    assert text(temperature=0) == text(temperature=0) == text(temperature=1, extra_body={"top_k": 1})
    assert text(seed=5) == text(seed=5) and len({text(seed=seed) for seed in range(4)}) > 1
    greedy = text(temperature=0)
    word = greedy.split()[2]
    assert text(temperature=0, stop=["never", word]) == greedy[: greedy.index(word)]
    assert text(temperature=0, presence_penalty=2, frequency_penalty=2) != greedy
    first = pair.openai().completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1)
    assert first.choices[0].text


def test_several_answers(small: Server) -> None:
    """The toy computes each row alike, whichever others a forward has."""
    client = small.openai()
    made = client.chat.completions.create(model="tree", messages=USER, max_tokens=16, n=3, seed=1)
    texts = [choice.message.content for choice in made.choices]
    assert [choice.index for choice in made.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert made.usage and made.usage.completion_tokens == 48
    again = client.chat.completions.create(model="tree", messages=USER, max_tokens=16, n=3, seed=1, stream=True)
    streamed = ["", "", ""]
    for chunk in again:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    alone = client.chat.completions.create(model="tree", messages=USER, max_tokens=16, seed=3)
    assert alone.choices[0].message.content == texts[2]


def test_logprobs(pair: Server) -> None:
    made = pair.openai().chat.completions.create(
        model=MODEL, messages=USER, max_tokens=20, temperature=0, logprobs=True, top_logprobs=4
    )
    assert made.choices[0].logprobs and made.choices[0].logprobs.content
    scores = made.choices[0].logprobs.content
    assert len(scores) == 20 and "".join(score.token for score in scores) == made.choices[0].message.content
    for score in scores:
        assert len(score.top_logprobs) == 4 and score.top_logprobs[0].token == score.token
        values = [top.logprob for top in score.top_logprobs]
        assert score.logprob == values[0] and values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-6
    plain = pair.openai().chat.completions.create(
        model=MODEL, messages=USER, max_tokens=20, temperature=0, logprobs=True, stream=True
    )
    streamed = [each for chunk in plain if (found := chunk.choices[0].logprobs) for each in found.content or ()]
    assert [each.token for each in streamed] == [each.token for each in scores]
    assert [each.logprob for each in streamed] == pytest.approx([each.logprob for each in scores], abs=0.05)


def test_json(pair: Server) -> None:
    client = pair.openai()
    loose: Any = {"type": "json_object"}
    made = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=400, seed=3, temperature=0.7, response_format=loose
    )
    choice = made.choices[0]
    assert (choice.message.content or "").startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        assert choice.finish_reason == "length"
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "sizes": {"type": "array", "items": {"enum": [1, 2]}},
        },
        "required": ["name", "sizes"],
        "additionalProperties": False,
    }
    strict: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    for seed in range(5):
        made = client.chat.completions.create(
            model=MODEL, messages=USER, max_tokens=300, seed=seed, response_format=strict
        )
        if made.choices[0].finish_reason == "stop":
            value = json.loads(made.choices[0].message.content or "")
            assert set(value) == {"name", "sizes"} and set(value["sizes"]) <= {1, 2} and len(value["name"]) <= 9


@pytest.mark.parametrize(
    ("choice", "tools", "expected"),
    [
        ("required", [WEATHER, TIME], {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, [WEATHER, TIME], {"get_time"}),
    ],
    ids=["one of two", "a named one"],
)
def test_a_call_that_has_to_be_made_and_its_result(
    choice: Any, tools: list[Any], expected: set[str], pair: Server
) -> None:
    client = pair.openai()
    made = client.chat.completions.create(
        model=MODEL, messages=USER, tools=tools, tool_choice=choice, max_tokens=200, temperature=0
    )
    answer = made.choices[0]
    assert answer.finish_reason == "tool_calls" and not answer.message.content and answer.message.tool_calls
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.function.name in expected
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2, 3)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    after = client.chat.completions.create(
        model=MODEL, messages=[*USER, answer.message.to_dict(), result], tools=tools, max_tokens=8, temperature=0
    )
    assert after.choices[0].message.content is not None


def test_several_calls_that_have_to_be_made(pair: Server) -> None:
    """Nothing but whole calls, whole or streamed, where several are asked for; one where they are not."""
    client = pair.openai()
    ask: Any = {"model": MODEL, "messages": USER, "max_tokens": 400, "temperature": 0}
    ask.update(tools=[WEATHER, TIME], tool_choice="required")
    answer = client.chat.completions.create(**ask, parallel_tool_calls=True).choices[0]
    calls = answer.message.tool_calls or []
    assert len(calls) > 1 and not (answer.message.content and answer.finish_reason == "tool_calls")
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.type == "function" and call.function.name in ("get_weather", "get_time")
        assert isinstance(json.loads(call.function.arguments), dict)
    chunks = client.chat.completions.create(**ask, parallel_tool_calls=True, stream=True)
    streamed = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert [each.index for each in streamed if each.id] == [*range(len(calls))]
    for parallel in ({}, {"parallel_tool_calls": False}):
        alone = client.chat.completions.create(**ask, **parallel).choices[0]
        assert alone.finish_reason == "tool_calls" and len(alone.message.tool_calls or ()) == 1


def test_tools_that_may_not_be_used(pair: Server) -> None:
    client = pair.openai()
    plain = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=12, temperature=0)
    unused = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=12, temperature=0, tools=[WEATHER], tool_choice="none"
    )
    assert unused.choices[0].message.content == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        client.chat.completions.create(
            model=MODEL, messages=USER, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "no"}}
        )


def test_parts_and_roles(pair: Server) -> None:
    client = pair.openai()
    parts: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "def read_"}, {"type": "text", "text": "lines(path):"}]}
    ]
    whole, cut = (
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
        for messages in (USER, parts)
    )
    assert whole.choices[0].message.content == cut.choices[0].message.content
    for role in ("system", "developer"):
        messages_with_system: list[Any] = [{"role": role, "content": "import os\n"}, *USER]
        made = client.chat.completions.create(model=MODEL, messages=messages_with_system, max_tokens=4)
        assert made.usage and whole.usage and made.usage.prompt_tokens > whole.usage.prompt_tokens


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"n": 1000}, "n: "),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"99999999": 1}}, "vocabulary"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"tool_choice": "required"}, "no tools"),
        ({"response_format": {"type": "json_schema"}}, "no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}}, "structure"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": ""}]}, "prompt is empty"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_refused(change: dict[str, Any], why: str, pair: Server) -> None:
    response = pair.post("/v1/chat/completions", json={"model": MODEL, "messages": USER, "max_tokens": 8, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and why in error["message"], error
    streamed = pair.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": USER, "max_tokens": 8, "stream": True, **change}
    )
    assert streamed.status_code == 400 and streamed.json() == response.json()


def test_other_refusals(pair: Server) -> None:
    assert pair.post("/v1/chat/completions", content=b"{not json").status_code == 400
    assert pair.post("/v1/chat/completions", content=b"[" * 100_000).status_code == 400
    assert pair.post("/v1/chat/completions", data={"model": MODEL}).status_code == 415
    assert pair.get("/v1/chat/completions").status_code == 405
    assert pair.get("/v1/nothing").status_code == 404
