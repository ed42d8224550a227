"""Bodies: any value in any field, bounds, and what the OpenAPI document allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edgespec.errors import InvalidRequest
from edgespec.server.anthropic import MessagesRequest
from edgespec.server.fields import Body, parse_body
from edgespec.server.inputs import EmbeddingRequest
from edgespec.server.ollama import OllamaChatRequest, OllamaGenerateRequest
from edgespec.server.openai import ChatRequest
from edgespec.server.responses import ResponsesRequest
from tests.server.serving import Server

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
CHAT: dict[str, Any] = {"model": "tree", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
FIELDS = {
    "/v1/chat/completions": [
        "model", "messages", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "tools",
        "logprobs", "top_logprobs", "tool_choice", "response_format", "logit_bias", "max_completion_tokens",
        "chat_template_kwargs", "reasoning_effort", "reasoning_budget_tokens", "draft_max", "speculative.n_max",
    ],
    "/v1/completions": ["model", "prompt", "echo", "suffix", "best_of", "logprobs", "n", "stop", "stream", "draft_max"],
    "/v1/responses": [
        "model", "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "stream", "reasoning",
    ],
    "/v1/messages": [
        "model", "messages", "system", "tools", "tool_choice", "stop_sequences", "max_tokens", "stream", "thinking",
        "output_config",
    ],
    "/v1/messages/count_tokens": ["model", "messages", "system", "tools", "tool_choice"],
    "/api/chat": ["model", "messages", "tools", "format", "think", "stream"],
}  # fmt: skip
WHOLE = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tree", "prompt": "x", "max_tokens": 3},
    "/v1/responses": {"model": "tree", "input": "x", "max_output_tokens": 3},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/api/chat": {"messages": CHAT["messages"], "options": {"num_predict": 3}},
}
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
MESSAGE = st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=20) | JSON}, optional={
    "tool_calls": JSON, "name": JSON, "reasoning_content": JSON, "tool_call_id": JSON})  # fmt: skip


def sound(response: httpx.Response) -> None:
    """An answer, or an error in the form of the interface."""
    assert response.status_code in (200, 400, 404), (response.status_code, response.text[:500])
    if response.headers["content-type"].startswith(("text/event-stream", "application/x-ndjson")):
        assert response.text.endswith("\n")
        return
    body = response.json()
    if response.status_code != 200:
        message = body["error"] if isinstance(body["error"], str) else body["error"]["message"]
        assert message.rstrip().endswith("."), body


@pytest.mark.parametrize("path", sorted(FIELDS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_field(path: str, data: st.DataObject, small: Server) -> None:
    field = data.draw(st.sampled_from(FIELDS[path]))
    value = data.draw(
        st.lists(MESSAGE, max_size=3) if field in ("messages", "input") and data.draw(st.booleans()) else JSON
    )
    sound(small.post(path, json={**WHOLE[path], field: value}))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=JSON | st.binary(max_size=40))
def test_any_body(body: Any, small: Server) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    for path in FIELDS.keys() - {"/api/chat"}:  # for which {} is a valid body
        response = small.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        sound(response)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=JSON, tool=st.dictionaries(st.sampled_from(["properties", "required", "type", "$ref", "$defs"]), JSON))
def test_any_schema(schema: Any, tool: dict[str, Any], small: Server) -> None:
    sound(small.post("/v1/chat/completions", json={
        **CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}))  # fmt: skip
    function = {"type": "function", "function": {"name": "f", "parameters": tool}}
    sound(small.post("/v1/chat/completions", json={**CHAT, "tools": [function], "tool_choice": "required"}))


MANY = 20_000
FAULTY: list[tuple[type[Body], dict[str, Any]]] = [
    *((ChatRequest, {"model": "m", "messages": messages}) for messages in (
        [0] * MANY,
        [{"role": "user", "content": [0] * MANY}],
        [{"role": "assistant", "tool_calls": [0] * MANY}],
    )),
    (ChatRequest, {**CHAT, "logit_bias": {f"x{i}": "y" for i in range(MANY)}}),
    (ChatRequest, {**CHAT, "stop": [0] * MANY}),
    (ChatRequest, {**CHAT, "tools": [0] * MANY}),
    *((MessagesRequest, {"model": "m", "max_tokens": 3, "messages": messages}) for messages in (
        [0] * MANY,
        [{"role": "user", "content": [0] * MANY}],
    )),
    (MessagesRequest, {**CHAT, "system": [0] * MANY}),
    (OllamaChatRequest, {"messages": [0] * MANY}),
    (OllamaChatRequest, {"messages": [{"role": "assistant", "tool_calls": [0] * MANY}]}),
    (OllamaGenerateRequest, {"options": {"stop": [0] * MANY}}),
    (ResponsesRequest, {"model": "m", "input": [0] * MANY}),
    (ResponsesRequest, {"model": "m", "input": [{"role": "user", "content": [0] * MANY}]}),
    (EmbeddingRequest, {"model": "m", "input": [None] * MANY}),
    (EmbeddingRequest, {"model": "m", "input": [["x"] * MANY] * 3}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), FAULTY)
def test_no_body_has_more_than_a_few_faults(kind: type[Body], body: dict[str, Any]) -> None:
    """Reporting millions of faults would take memory, and time from other requests."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 40


HEAD = b'{"messages": [{"role": "user", "content": "hi"}], "more": '


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (b"[" + b"[]," * 2**17 + b"0]", "131,072 arrays, objects and keys"),
        (b'["",' + b'{"a":' * 2**17, "131,072 arrays, objects and keys"),
        (b"[" + b'"",' * (2**20 + 1) + b"0]", "1,048,576 values"),
        (b"[" + b'"\\"",' * (2**20 + 1) + b"0]", "1,048,576 values"),
    ],
    ids=["arrays", "keys", "strings", "quotes"],
)
def test_too_many(more: bytes, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the body has more than {name}"):
        parse_body(HEAD + more + b"}", ChatRequest)


def test_the_text_of_strings_has_no_such_bounds() -> None:
    text = 'def f(a, b): return {a: ["x", \'\\\\"\']}\n' * 60_000
    for ascii_only in (True, False):
        body = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=ascii_only).encode()
        assert parse_body(body, ChatRequest).messages[0].content == text


def test_what_the_document_allows(small: Server, tmp_path: Path) -> None:
    document = small.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1") and "/v1/chat/completions" in document["paths"]
    program = Path(sys.executable).parent / "schemathesis"
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    done = subprocess.run(
        [str(program), "run", f"{small.url}/openapi.json", "--include-path-regex", "^/v1/(chat|comp|resp|mess)",
         "--max-examples", "4", "--seed", "1", "--phases", "examples,fuzzing", "--checks", checks,
         "--suppress-health-check", "all", "--no-color"],
        capture_output=True, text=True, cwd=tmp_path, timeout=300, env={**os.environ, "COLUMNS": "150"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert small.ask("tree", max_tokens=3).status_code == 200
