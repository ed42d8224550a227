"""What all interfaces share: the same answers, whole and streamed, their ends, calls and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.interfaces import (
    CHAT,
    CHATS,
    DEMAND,
    GENERATE,
    MESSAGES,
    OLLAMA,
    PATHS,
    RESPONSES,
    TEXT,
    Answer,
    ask,
    make_body,
    stream,
)
from tests.server.serving import Server

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def greedy(pair: Server) -> Answer:
    """The embedded model's template has no turns, so every interface reads the same prompt."""
    return ask(pair, CHAT)


@pytest.mark.parametrize("path", PATHS)
def test_whole_and_streamed_answers_are_the_same(path: str, pair: Server, greedy: Answer) -> None:
    whole = ask(pair, path)
    assert (whole.text, whole.ending, whole.written) == (greedy.text, "length", 24)
    assert whole.read > 3 and (whole.read == greedy.read or path == TEXT)
    assert stream(pair, path) == whole


@pytest.mark.parametrize("path", [path for path in PATHS if path != RESPONSES])  # which has no stop strings
def test_stop_strings(path: str, pair: Server, greedy: Answer) -> None:
    word = greedy.text.split()[2]
    answer = ask(pair, path, stop=word)
    assert (answer.text, answer.ending) == (greedy.text[: greedy.text.index(word)], "stop")


@pytest.mark.parametrize("path", PATHS)
def test_a_top_k_of_minus_one_is_off(path: str, pair: Server) -> None:
    def text(**settings: Any) -> str:
        body, settings = make_body(path), {"seed": 3, "temperature": 1, **settings}
        if path.startswith("/api"):
            settings = {"options": {**body["options"], **settings}}
        return ask(pair, path, **settings).text

    assert text(top_k=-1) == text() != text(top_k=1)


EMOJI = "é🙂👨‍👩‍👧"
SCHEMA = {"enum": [EMOJI]}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    CHAT: {"structured_outputs": {"choice": [EMOJI]}},
    TEXT: {"structured_outputs": {"choice": [EMOJI]}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    MESSAGES: {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    OLLAMA: {"format": SCHEMA},
    GENERATE: {"format": SCHEMA},
}


@pytest.mark.parametrize("path", PATHS)
def test_a_limit_inside_a_character_leaves_it_out(path: str, pair: Server) -> None:
    """The embedded vocabulary has no emoji: each has a token for each of its bytes."""
    whole = ask(pair, path, limit=64, **CONSTRAINTS[path])
    assert whole.text.strip('"') == EMOJI and whole.written > len(EMOJI) + 8
    texts = []
    for limit in range(2, 14):
        cut = ask(pair, path, limit=limit, **CONSTRAINTS[path])
        assert whole.text.startswith(cut.text) and cut.ending == "length" and cut.written == limit, cut
        texts.append(cut.text)
        if limit < 6:
            assert stream(pair, path, limit=limit, **CONSTRAINTS[path]) == cut
    assert len({*texts}) < len(texts), "some limits fall inside a character"


@pytest.mark.parametrize("path", DEMAND)
def test_a_call_that_has_to_be_made(path: str, pair: Server) -> None:
    whole = ask(pair, path, limit=200, tool=TOOL)
    ((name, arguments),) = whole.calls
    assert (whole.text, whole.ending, name) == ("", "tool_calls", "get_weather")
    assert set(json.loads(arguments)) == {"city", "days"} and json.loads(arguments)["days"] in (1, 2, 3)
    streamed = stream(pair, path, limit=200, tool=TOOL)
    ((_, written),) = streamed.calls
    assert json.loads(written) == json.loads(arguments) and streamed.ending == "tool_calls"


@pytest.mark.parametrize("path", DEMAND)
def test_a_call_that_is_cut_is_there_with_its_beginning(path: str, pair: Server) -> None:
    whole = ask(pair, path, limit=200, tool=TOOL)
    for limit in (1, whole.written // 2):
        cut = ask(pair, path, limit=limit, tool=TOOL)
        ((_, written),) = cut.calls
        assert (cut.text, cut.ending) == ("", "length") and stream(pair, path, limit=limit, tool=TOOL) == cut
        if path == MESSAGES:
            assert set(json.loads(written)) <= {"city", "days"}
        else:
            assert whole.calls[0][1].startswith(written)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_is_too_long(path: str, is_streamed: bool, pair: Server) -> None:
    """It is told in the words and codes by which clients recognize it."""
    response = pair.post(path, json=make_body(path, "word " * 600, stream=is_streamed))
    error: Any = response.json()["error"]
    assert response.status_code == 400
    if path == MESSAGES:
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long: ") and error["message"].endswith("> 512 maximum")
    elif path.startswith("/api"):
        assert error.startswith("This model's maximum context length is 512 tokens")
    else:
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert "maximum context length is 512 tokens" in error["message"] and "/new" not in error["message"]
        assert error["n_ctx"] == 512 < error["n_prompt_tokens"]


@pytest.mark.parametrize("path", CHATS)
def test_images_are_refused(path: str, pair: Server) -> None:
    if path == OLLAMA:
        kind, body = "image", make_body(path, "")
        body["messages"][0]["images"] = ["AA=="]
    else:
        kind = {CHAT: "image_url", RESPONSES: "input_image", MESSAGES: "image"}[path]
        body = make_body(path, [{"type": kind}])
    response = pair.post(path, json=body)
    told = f"content of type '{kind}' is not supported: the model reads text only."
    assert response.status_code == 400 and told in response.text
