"""OpenAI's interfaces, through its own client."""

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


def test_chunks(pair: Server) -> None:
    ask: Any = {"model": MODEL, "messages": USER, "max_tokens": 40, "temperature": 0, "stream": True}
    chunks = list(pair.openai().chat.completions.create(**ask, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert not chunks[-1].choices and usage and usage.completion_tokens == 40
    assert usage.prompt_tokens_details and usage.total_tokens == usage.prompt_tokens + 40
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_has_a_usage_where_it_is_asked_for(pair: Server, path: str) -> None:
    asked = {"messages": USER} if "chat" in path else {"prompt": PROMPT}
    body = {"model": MODEL, **asked, "max_tokens": 3, "stream": True, "return_progress": True}
    answer = pair.post(path, json={**body, "stream_options": {"include_usage": True}})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1) and chunks[-1]["usage"]
    for options in (None, {"include_usage": None}):
        assert '"usage"' not in pair.post(path, json={**body, "stream_options": options}).text


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


def test_logprobs_end_with_the_text(pair: Server, toy: Server) -> None:
    """They have neither the token that ends an answer nor those of a stop string."""
    client = pair.openai()
    common: dict[str, Any] = {"model": MODEL, "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(prompt=PROMPT, logprobs=0, **common).choices[0]
    assert whole.logprobs and whole.logprobs.tokens
    tokens = whole.logprobs.tokens
    for stop, n in (("".join(tokens[12:14]), 12), (tokens[20][-1:] + "".join(tokens[21:24]), 21)):
        place = whole.text.index(stop)
        n = sum(len("".join(tokens[:i])) < place for i in range(len(tokens)))
        cut = client.completions.create(prompt=PROMPT, logprobs=0, stop=stop, **common).choices[0]
        assert cut.text == whole.text[:place] and cut.logprobs and cut.logprobs.tokens == tokens[:n]
        streamed = client.completions.create(prompt=PROMPT, logprobs=0, stop=stop, stream=True, **common)
        parts = [chunk.choices[0] for chunk in streamed]
        assert [token for part in parts if part.logprobs for token in part.logprobs.tokens or ()] == tokens[:n]
    ended = toy.openai().completions.create(model="tree", prompt="a", logprobs=1, logit_bias={"256": 100})
    assert ended.choices[0].finish_reason == "stop" and not ended.choices[0].text
    assert ended.choices[0].logprobs is None or not ended.choices[0].logprobs.tokens


def test_logprobs_of_responses(pair: Server) -> None:
    client = pair.openai()
    common: dict[str, Any] = {"model": MODEL, "input": PROMPT, "max_output_tokens": 20, "temperature": 0}
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made: Any = client.responses.create(**common, **asked)
    (content,) = made.output[0].content
    assert "".join(each.token for each in content.logprobs) == content.text == made.output_text
    assert all(len(each.top_logprobs) == 2 for each in content.logprobs)
    events: Any = list(client.responses.create(**common, **asked, stream=True))
    deltas = [each for each in events if each.type == "response.output_text.delta"]
    assert "".join(score.token for each in deltas for score in each.logprobs) == content.text
    (done,) = [each for each in events if each.type == "response.output_text.done"]
    assert len(done.logprobs) == len(content.logprobs)
    plain: Any = client.responses.create(**common)
    assert plain.output[0].content[0].logprobs == []


def test_a_named_call_and_its_result(pair: Server) -> None:
    client = pair.openai()
    choice: Any = {"type": "function", "function": {"name": "get_time"}}
    tools = [WEATHER, TIME]
    made = client.chat.completions.create(
        model=MODEL, messages=USER, tools=tools, tool_choice=choice, max_tokens=200, temperature=0
    )
    answer = made.choices[0]
    assert answer.finish_reason == "tool_calls" and not answer.message.content and answer.message.tool_calls
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.function.name == "get_time"
    assert isinstance(json.loads(call.function.arguments), dict)
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


def test_parts_and_roles(pair: Server) -> None:
    client = pair.openai()
    content = [{"type": "text", "text": "import os"}, {"type": "refusal", "refusal": PROMPT}]
    whole, cut = (
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": each}], max_tokens=12, temperature=0
        )
        for each in (f"import os\n{PROMPT}", content)
    )
    assert whole.choices[0].message.content == cut.choices[0].message.content
    for role in ("system", "developer"):
        messages_with_system: list[Any] = [{"role": role, "content": "import os\n"}, *USER]
        made = client.chat.completions.create(model=MODEL, messages=messages_with_system, max_tokens=4)
        assert made.usage and whole.usage and made.usage.prompt_tokens == whole.usage.prompt_tokens


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


def test_offsets_of_characters_of_several_tokens(pair: Server) -> None:
    client = pair.openai()
    common: dict[str, Any] = {"model": MODEL, "prompt": 's = "€😀é"\nt', "echo": True, "logprobs": 0, "max_tokens": 2}
    chunks = [chunk.choices[0] for chunk in client.completions.create(**common, stream=True)]
    (whole,) = client.completions.create(**common).choices
    for text, scores in (
        ("".join(each.text for each in chunks), [each.logprobs for each in chunks if each.logprobs]),
        (whole.text, [whole.logprobs]),
    ):
        places = [place for each in scores for place in zip(each.tokens, each.text_offset, strict=True)]
        assert any("\ufffd" in token for token, _ in places)
        assert all(text.startswith(token, at) for token, at in places if "\ufffd" not in token)


def test_token_ids(pair: Server) -> None:
    client = pair.openai()
    common: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
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
    assert made.output_text and made.status == made.output[0].status == "incomplete"
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
