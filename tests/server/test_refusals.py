"""What every interface refuses, and the sentence that says why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import PROMPT, Server

USER: list[Any] = [{"role": "user", "content": PROMPT}]
BEGUN = [*USER, {"role": "assistant", "content": "\n    with open(path) as"}]
PREFIX = [*USER, {"role": "assistant", "content": "\n    with open(path) as", "prefix": True}]
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS, EMBED, GENERATE = "/v1/embeddings", "/api/embed", "/api/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 8},
    TEXT: {"prompt": PROMPT},
    RESPONSES: {"input": PROMPT},
    MESSAGES: {"messages": USER, "max_tokens": 8},
    EMBEDDINGS: {"input": "x"},
    EMBED: {"input": "x"},
    GENERATE: {"prompt": PROMPT},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "role"),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, "prompt is empty"),
    (CHAT, {"temperature": 3}, "temperature"),
    (CHAT, {"max_tokens": -2}, "max_tokens"),
    (CHAT, {"n": 1000}, "n: "),
    (CHAT, {"n": True}, "n: a number is required, not a boolean"),
    (CHAT, {"temperature": False}, "temperature: a number is required"),
    (CHAT, {"logit_bias": {"5": True}}, "logit_bias.5: a number is required"),
    (RESPONSES, {"max_output_tokens": True}, "max_output_tokens: a number is required"),
    (GENERATE, {"options": {"top_k": True}}, "options.top_k: a number is required"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logit_bias": {"99999999": 1}}, "vocabulary"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["x"] * 17}, "stop: List should have at most 16 items."),
    (CHAT, {"stop": ["x", ""]}, "stop.1: String should have at least 1 character."),
    (CHAT, {"stop": 5}, "stop: Input should be a valid string or a valid list."),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type: Field required."),
    (TEXT, {"prompt": ["a", 5]}, "prompt.1: Input should be a valid string or a valid list."),
    (GENERATE, {"think": "banana"}, "think: Input should be a valid boolean or 'low', 'medium', 'high' or 'max'."),
    (GENERATE, {"format": "banana"}, "format: Input should be '' or 'json' or a valid object."),
    (CHAT, {"tool_choice": "required"}, "no tools"),
    (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "not among the"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "no schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}}, "structure"),
    (CHAT, {"grammar": 'root ::= "a"', "structured_outputs": {"regex": "a"}}, "outputs.regex both constrain"),
    (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag: Extra inputs are not"),
    (CHAT, {"grammar": "root ::= ["}, "grammar cannot be read"),
    (CHAT, {"grammar": "start: ("}, "structure cannot be followed: Expected token ')', found"),
    (CHAT, {"grammar": 'start: start "a"'}, "structure cannot be followed: it allows no text."),
    (CHAT, {"structured_outputs": {"regex": "(?=a)b"}}, "look-behind, is not supported. Correct or simplify it."),
    (CHAT, {"structured_outputs": {"json": "{"}}, "Invalid JSON"),
    (CHAT, {"repetition_detection": {"max_pattern_size": 4, "min_count": 1}}, "min_count: Input should be greater"),
    (CHAT, {"modalities": ["text", "audio"]}, "text only"),
    (CHAT, {"audio": {"voice": "x"}}, "audio is not supported"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions is not supported"),
    (CHAT, {"guided_regex": "a+"}, "guided_regex is not supported"),
    (CHAT, {"web_search_options": {"a": 1}}, "web_search_options is not supported"),
    (CHAT, {"continue_final_message": True}, "only a last message of the assistant"),
    (CHAT, {"messages": PREFIX, "response_format": {"type": "json_object"}}, "beginning is given"),
    (CHAT, {"messages": PREFIX, "tools": [FUNCTION], "tool_choice": "required"}, "beginning is given"),
    (TEXT, {"suffix": "x"}, "no markers for a suffix"),
    (TEXT, {"suffix": "x", "prompt": [1, 2]}, "suffix needs a prompt as text"),
    (TEXT, {"best_of": 3}, "best_of is not supported"),
    (TEXT, {"prompt": [1, 99_999_999]}, "prompt of token ids has ids below"),
    (TEXT, {"prompt": [1, 2], "echo": True}, "echo of token ids needs logprobs"),
    (TEXT, {"prompt": ["x"] * 100, "n": 2}, "more than 128 answers"),
    (RESPONSES, {"background": True}, "background is not supported"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation is not supported"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
    (RESPONSES, {"tools": [{"type": "code_interpreter"}]}, "tools of type 'code_interpreter'"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input items of type 'item_reference'"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "call_id is missing"),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}]}, "call_id is missing"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is missing"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}, "name is missing"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "no tools"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools of type 'bash_20250124'"),
    (MESSAGES, {"mcp_servers": [{"type": "url", "url": "https://example.com"}]}, "mcp_servers is not supported"),
    (MESSAGES, {"messages": BEGUN, "output_format": {"type": "json_schema", "schema": {}}}, "beginning is given"),
    (EMBEDDINGS, {"input": ""}, "empty"),
    (EMBEDDINGS, {"input": ["x", ""]}, "empty"),
    (EMBEDDINGS, {"input": [[]]}, "token ids"),
    (EMBEDDINGS, {"input": "x" * 10**7}, "maximum context length is 512"),
    (EMBEDDINGS, {"input": [10**6]}, "has ids below"),
    (EMBEDDINGS, {"input": [-1]}, "input"),
    (EMBEDDINGS, {"input": ["x"] * 3000}, "more than 2,048"),
    (EMBEDDINGS, {"dimensions": 8}, "own size"),
    (EMBEDDINGS, {"encoding_format": "hex"}, "float"),
    (EMBED, {"input": "word " * 5000, "truncate": False}, "maximum context length is 512"),
    (GENERATE, {"context": [1, 2]}, "context is not supported."),
    (GENERATE, {"options": {"top_p": 3}}, "options.top_p: "),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "why"), REFUSED, ids=lambda value: next(iter(value))[:20])
def test_what_is_refused(path: str, change: dict[str, Any], why: str, pair: Server) -> None:
    response = pair.post(path, json={**BODIES[path], **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert why in (error if path.startswith("/api/") else error["message"]), error
    assert path.startswith("/api/") or error["type"] == "invalid_request_error"
    assert (response.json().get("type") == "error") == (path == MESSAGES)
    if path in (CHAT, TEXT, RESPONSES, MESSAGES) and "grammar" not in change:  # whose check may take seconds
        streamed = pair.post(path, json={**BODIES[path], **change, "stream": True})
        assert streamed.status_code == 400 and streamed.json() == response.json()


@pytest.mark.parametrize("name", ["météo", "x" * 257])
def test_names_that_cannot_be_called(name: str, small: Server) -> None:
    function = {"name": name, "parameters": {"type": "object"}}
    for path, change in (
        (CHAT, {"tools": [{"type": "function", "function": function}]}),
        (RESPONSES, {"tools": [{"type": "function", **function}]}),
        (MESSAGES, {"tools": [{"name": name, "input_schema": function["parameters"]}]}),
        ("/api/chat", {"messages": USER, "tools": [{"type": "function", "function": function}]}),
    ):
        response = small.post(path, json={**BODIES.get(path, {}), **change})
        said = f"the tool name '{name[:100]}' cannot be called. Use 1 to 256 ASCII letters"
        assert response.status_code == 400 and said in response.text, response.text


def test_bodies_that_are_no_json(pair: Server) -> None:
    assert pair.post(CHAT, content=b"{not json").status_code == 400
    assert pair.post(CHAT, content=b"[" * 100_000).status_code == 400
    assert pair.post(CHAT, data={"model": "embedded"}).status_code == 415
