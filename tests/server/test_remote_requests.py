"""What another server is asked, and how its answers are read: the fields of each kind of server, and any JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.answers.response import Done
from edgespec.errors import InvalidRequest
from edgespec.server.anthropic import MessagesRequest
from edgespec.server.http import HttpError, dump_json
from edgespec.server.ollama import OllamaChatRequest, OllamaGenerateRequest
from edgespec.server.openai import ChatRequest
from edgespec.server.remote import _MALFORMED, CHAT, TEXT, RemoteAnswer, RemoteCall, make_calls, translate
from edgespec.server.remote_client import RemoteModel, explain_error, find_error
from edgespec.server.responses import ResponsesRequest

USER: Any = {"role": "user", "content": "x"}


def ask(kind: Any, owner: str = "vllm", *, remembers: bool = False, **fields: Any) -> RemoteCall:
    (spec,) = kind.model_validate({"model": "m", **fields}).generation_specs()
    return translate(spec, owner, remembers=remembers)


@pytest.mark.parametrize(
    ("owner", "limit"), [("vllm", "max_tokens"), ("", "max_tokens"), ("system", "max_completion_tokens")]
)
def test_the_name_of_the_limit(owner: str, limit: str) -> None:
    body = ask(MessagesRequest, owner, max_tokens=7, messages=[USER]).body
    assert body == {"messages": [USER], limit: 7}
    assert ask(MessagesRequest, owner, max_tokens=-1, messages=[USER]).body == {"messages": [USER]}


def test_reasoning_goes_to_servers_that_know_it() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    for owner, budget in (("edgespec", "reasoning_budget_tokens"), ("llamacpp", "reasoning_budget_tokens"),
                          ("vllm", "thinking_token_budget")):  # fmt: skip
        call = ask(MessagesRequest, owner, max_tokens=7, messages=[USER], thinking=thinking)
        assert call.body["chat_template_kwargs"] == {"enable_thinking": True} and call.body[budget] == 2000
        assert not call.warnings
    call = ask(MessagesRequest, "openai", max_tokens=7, messages=[USER], thinking=thinking)
    assert set(call.body) == {"messages", "max_completion_tokens"} and len(call.warnings) == 2
    assert ask(ResponsesRequest, "openai", input="x", reasoning={"effort": "low"}).body["reasoning_effort"] == "low"


def test_ollama() -> None:
    options = {"repeat_penalty": 1.2, "num_predict": 3, "num_ctx": 9}
    call = ask(OllamaChatRequest, "llamacpp", messages=[USER], options=options)
    assert (call.path, call.body["repeat_penalty"], call.body["max_tokens"]) == (CHAT, 1.2, 3)
    assert "options.num_ctx is ignored" in call.warnings[0]
    assert ask(OllamaChatRequest, "vllm", messages=[USER], options=options).body["repetition_penalty"] == 1.2
    assert ask(OllamaGenerateRequest, prompt="a", raw=True) == RemoteCall(TEXT, {"prompt": "a"})
    assert ask(OllamaGenerateRequest, prompt="a", suffix="b") == RemoteCall(TEXT, {"prompt": "a", "suffix": "b"})
    assert ask(OllamaChatRequest, messages=[USER], format="json").body["response_format"] == {"type": "json_object"}


def test_calls_without_ids_get_some_that_agree() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": 1}}} for name in "ab"]
    results = [{"role": "tool", "content": text} for text in "12"]
    sent = ask(OllamaChatRequest, messages=[USER, {"role": "assistant", "tool_calls": calls}, *results, USER]).body
    made, one, two = sent["messages"][1]["tool_calls"], *sent["messages"][2:4]
    assert [made[0]["id"], made[1]["id"]] == [one["tool_call_id"], two["tool_call_id"]]
    assert made[0]["id"] != made[1]["id"] and made[0]["function"]["arguments"] == '{"n": 1}'


def test_the_beginning_of_an_answer() -> None:
    messages = [USER, {"role": "assistant", "content": "be"}]
    asked = ask(MessagesRequest, max_tokens=7, messages=messages).body
    assert asked["messages"] == messages and asked["continue_final_message"] and not asked["add_generation_prompt"]
    assert "continue_final_message" not in ask(MessagesRequest, "llamacpp", max_tokens=7, messages=messages).body


def pass_chat(raw: bytes, owner: str) -> RemoteCall:
    (call,) = make_calls(ChatRequest.model_validate_json(raw), raw, owner, remembers=False)
    return call


@pytest.mark.parametrize("owner", ["edgespec", "llamacpp"])
def test_only_an_edgespec_gets_the_fields_of_edgespec(owner: str) -> None:
    raw = dump_json({"messages": [USER], "draft_max": 2, "memory": True, "ttl": 9, "model": "m"})
    body = pass_chat(raw, owner).make_body("there", 0)
    assert body["model"] == "there" and "ttl" not in body
    assert (body.get("draft_max"), body.get("memory")) == ((2, False) if owner == "edgespec" else (None, None))
    call = ask(MessagesRequest, owner, remembers=True, max_tokens=7, messages=[USER], draft_max=2)
    assert (call.body.get("draft_max"), call.body.get("memory")) == ((2, True) if owner == "edgespec" else (None, None))
    assert bool(call.warnings) == (owner != "edgespec")


@pytest.mark.parametrize("written", [int, str])
def test_each_copy_has_a_seed_of_its_own(written: Callable[[int], Any]) -> None:
    call = pass_chat(dump_json({"messages": [USER], "seed": written(2**32 - 1), "n": 2, "max_tokens": written(-1)}), "")
    assert [call.make_body("m", copy)["seed"] for copy in (0, 1)] == [2**32 - 1, 0]
    assert not {"n", "max_tokens"} & call.body.keys()


NAMES = st.sampled_from([
    "choices", "delta", "message", "content", "reasoning", "tool_calls", "function", "name", "index",
    "arguments", "finish_reason", "stop_reason", "logprobs", "tokens", "token_logprobs", "top_logprobs", "token",
    "bytes", "logprob", "usage", "prompt_tokens", "completion_tokens", "timings", "tau", "draft_n",
    "predicted_per_second", "prompt_ms", "warnings", "prompt_tokens_details", "text", "error", "detail",
])  # fmt: skip
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)
CHOICES = st.fixed_dictionaries(
    {"choices": st.lists(st.dictionaries(NAMES, VALUES, max_size=4), max_size=2)},
    optional={"usage": VALUES, "timings": st.dictionaries(NAMES, VALUES), "warnings": VALUES},
)


@settings(max_examples=60, deadline=None)
@given(st.lists(CHOICES, max_size=3))
def test_any_event_is_read_or_refused(events: list[dict[str, Any]]) -> None:
    answer = RemoteAnswer(())
    try:
        for event in events:
            list(answer.parts(event))
    except _MALFORMED:
        pass
    (*_, done) = answer.finish()
    assert isinstance(done, Done)
    metrics = answer.summarize().metrics
    assert metrics.emitted_tokens >= 0 and metrics.target_forwards >= 0
    json.dumps(done.extensions())


@pytest.mark.parametrize(("reported", "counted"), [(7, 7), (0, 0), (-1, 1), (10**12, 1), ("7", 1), (None, 1)])
def test_tokens_are_counted_as_reported_and_else_by_events(reported: object, counted: int) -> None:
    answer = RemoteAnswer(())
    usage = {"prompt_tokens": 3, "completion_tokens": reported}
    list(answer.parts({"choices": [{"delta": {"content": "well"}}], "usage": usage}))
    metrics = answer.summarize().metrics
    assert (metrics.prompt_tokens, metrics.emitted_tokens) == (3, counted)


def test_times_are_those_at_which_the_answer_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens: the first after a second, the others within two more."""
    now = iter((10.0, 11.0, 13.0))
    monkeypatch.setattr("edgespec.server.remote.monotonic", lambda: next(now))
    answer = RemoteAnswer(())
    for text, usage in (("a", {}), ("bcde", {"completion_tokens": 5})):
        list(answer.parts({"choices": [{"delta": {"content": text}}], "usage": usage}))
    metrics = answer.summarize().metrics
    assert (metrics.ttft_s, metrics.tpot_s, metrics.tokens_per_second) == (1.0, 0.5, 2.0)


def test_reasoning_between_calls_is_kept() -> None:
    def call(number: int, arguments: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": number, "function": {"name": "f", "arguments": arguments}}]}

    answer, writer = RemoteAnswer(()), ChatRequest.model_validate({"model": "m", "messages": [USER]}).writer()
    deltas = (call(0, '{"a":1}'), {"reasoning_content": "hmm"}, call(1, '{"b":2}'))
    parts = [part for delta in deltas for part in answer.parts({"choices": [{"delta": delta}]})]
    for part in (*parts, *answer.finish()):
        list(writer.events(0, part))
    message = writer.response_body()["choices"][0]["message"]
    assert message["reasoning_content"] == "hmm"
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == ['{"a":1}', '{"b":2}']


def test_what_is_not_supported_here_is_passed_on() -> None:
    body = ChatRequest.model_validate({"model": "m", "messages": [USER], "web_search_options": {"a": 1}})
    with pytest.raises(InvalidRequest, match="web_search_options is not supported"):
        body.require_supported()


@pytest.mark.parametrize("before", [0, 990, 995, 1000])
def test_a_key_in_an_error_is_never_told(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a part of it, where a long message is cut."""
    monkeypatch.setenv("THE_KEY", "sk-secret")
    model = RemoteModel(url="http://box:8000", model="m", key_env="THE_KEY")
    told = explain_error("far", model, 400, {"message": "x" * before + "sk-secret at box:8000"})
    assert "sk" not in told.message and "box" not in told.message and len(told.message) < 1040


@pytest.mark.parametrize("status", [401, 403])
def test_an_event_that_refuses_the_key_says_nothing_of_it(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers send status 200 and then an event with the error."""
    monkeypatch.setenv("THE_KEY", "sk-secret")
    model = RemoteModel(url="http://box:8000", model="m", key_env="THE_KEY")
    told = explain_error("far", model, status, {"message": "Incorrect API key provided: sk-s****et"})
    assert isinstance(told, HttpError) and told.status == 502
    assert told.message == "the server behind 'far' refuses its key; set THE_KEY."


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_any_error_is_read(value: Any) -> None:
    found = find_error({"error": value})
    assert found is None or isinstance(found, dict)
