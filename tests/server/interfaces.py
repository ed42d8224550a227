"""One request in the forms of all interfaces, and what their answers say, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from pydantic_core import from_json

from tests.server.serving import KEY, PROMPT, Server

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
DEMAND = (CHAT, RESPONSES, MESSAGES)  # can demand a call
CHATS = (*DEMAND, OLLAMA)
PATHS = (*CHATS, TEXT, GENERATE)
ENDINGS = {"max_tokens": "length", "incomplete": "length", "end_turn": "stop", "stop_sequence": "stop",
           "completed": "stop", "tool_use": "tool_calls"}  # fmt: skip
_LIMITS = {RESPONSES: "max_output_tokens", OLLAMA: "num_predict", GENERATE: "num_predict"}


@dataclass
class Answer:
    """What an answer says. `read` are the tokens of the prompt, `written` those of the answer."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ending: str = ""
    read: int = 0
    written: int = 0


def make_body(
    path: str, prompt: Any = PROMPT, *, limit: int = 24, stop: str = "", tool: Any = None, **more: Any
) -> dict[str, Any]:
    """The greedy request for an answer of at most `limit` tokens that ends before `stop` and must call `tool`, a
    function, if there is one. `prompt`: a text, or the content of a message. `more`: fields that all name alike.
    """
    settings: dict[str, Any] = {"temperature": 0, _LIMITS.get(path, "max_tokens"): limit}
    if stop:
        settings["stop_sequences" if path == MESSAGES else "stop"] = [stop]
    body: dict[str, Any] = {"options": settings} if path.startswith("/api") else settings
    if path in (TEXT, GENERATE):
        body |= {"prompt": prompt}
    elif path == RESPONSES:
        body |= {"input": [{"role": "user", "content": prompt}]}
    else:
        body |= {"messages": [{"role": "user", "content": prompt}]}
    if tool is not None:
        forms = {
            RESPONSES: {"type": "function", **tool},
            MESSAGES: {"name": tool["name"], "input_schema": tool["parameters"]},
        }
        body |= {"tools": [forms.get(path, {"type": "function", "function": tool})]}
        body |= {"tool_choice": {"type": "any"} if path == MESSAGES else "required"}
    return {"stream": False, **body, **more}


def ask(server: Server, path: str, prompt: Any = PROMPT, **options: Any) -> Answer:
    response = server.post(path, json=make_body(path, prompt, **options), headers={"x-api-key": KEY})
    assert response.status_code == 200, response.text
    return _READERS[path](response.json())


def stream(server: Server, path: str, prompt: Any = PROMPT, **options: Any) -> Answer:
    """The answer that a stream's events build, as a client reads them."""
    response = server.post(path, json=make_body(path, prompt, stream=True, **options), headers={"x-api-key": KEY})
    assert response.status_code == 200, response.text
    return _STREAMS[path](list(_events(response)))


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    is_lines = response.headers["content-type"] == "application/x-ndjson"
    for line in response.text.splitlines():
        if is_lines or line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _read_chat(body: dict[str, Any]) -> Answer:
    (choice,) = body["choices"]
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())]
    usage = body["usage"]
    read, written = usage["prompt_tokens"], usage["completion_tokens"]
    return Answer(message["content"] or "", calls, choice["finish_reason"], read, written)


def _stream_chat(events: list[dict[str, Any]]) -> Answer:
    answer = Answer()
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            answer.text += delta.get("content") or ""
            answer.ending = choice["finish_reason"] or answer.ending
            for call in delta.get("tool_calls", ()):
                name, arguments = call["function"].get("name"), call["function"]["arguments"]
                before = ("", "") if name else answer.calls.pop()
                answer.calls.append((name or before[0], before[1] + arguments))
        if "timings" in event:
            answer.read = event["timings"]["prompt_n"] + event["timings"]["cache_n"]
            answer.written = event["timings"]["predicted_n"]
    return answer


def _read_messages(body: dict[str, Any]) -> Answer:
    texts = [block["text"] for block in body["content"] if block["type"] == "text"]
    calls = [(block["name"], json.dumps(block["input"])) for block in body["content"] if block["type"] == "tool_use"]
    usage = body["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return Answer("".join(texts), calls, ENDINGS[body["stop_reason"]], read, usage["output_tokens"])


def _stream_messages(events: list[dict[str, Any]]) -> Answer:
    content: list[dict[str, Any]] = []
    body: dict[str, Any] = {"content": content}
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    for event in events:
        kind, delta = event["type"], event.get("delta", {})
        if kind == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "json": ""})
        elif kind == "content_block_delta":
            content[-1]["text"] = content[-1].get("text", "") + delta.get("text", "")
            content[-1]["json"] += delta.get("partial_json", "")
        elif kind == "content_block_stop" and content[-1]["type"] == "tool_use":
            content[-1]["input"] = from_json(content[-1]["json"] or "{}", allow_partial=True)
        elif kind == "message_delta":
            body |= {**delta, "usage": event["usage"]}
    return _read_messages(body)


def _read_response(body: dict[str, Any]) -> Answer:
    texts = [item["content"][0]["text"] for item in body["output"] if item["type"] == "message"]
    calls = [(item["name"], item["arguments"]) for item in body["output"] if item["type"] == "function_call"]
    ending, usage = ENDINGS[body["status"]], body["usage"]
    ending = "tool_calls" if calls and ending == "stop" else ending
    return Answer("".join(texts), calls, ending, usage["input_tokens"], usage["output_tokens"])


def _stream_response(events: list[dict[str, Any]]) -> Answer:
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    answer = _read_response(events[-1]["response"])
    deltas = {"response.output_text.delta": answer.text, "response.function_call_arguments.delta": ""}
    if answer.calls:
        deltas["response.function_call_arguments.delta"] = answer.calls[0][1]
    for kind, whole in deltas.items():
        assert "".join(event["delta"] for event in events if event["type"] == kind) == whole
    return answer


def _read_ollama(body: dict[str, Any]) -> Answer:
    text = body["message"]["content"] if "message" in body else body["response"]
    return Answer(text, [], body.get("done_reason", ""), body.get("prompt_eval_count", 0), body.get("eval_count", 0))


def _stream_ollama(events: list[dict[str, Any]]) -> Answer:
    *pieces, last = map(_read_ollama, events)
    assert [event["done"] for event in events] == [*([False] * len(pieces)), True] and not last.text
    return replace(last, text="".join(each.text for each in pieces))


_READERS = {CHAT: _read_chat, TEXT: _read_chat, RESPONSES: _read_response, MESSAGES: _read_messages,
            OLLAMA: _read_ollama, GENERATE: _read_ollama}  # fmt: skip
_STREAMS = {CHAT: _stream_chat, TEXT: _stream_chat, RESPONSES: _stream_response, MESSAGES: _stream_messages,
            OLLAMA: _stream_ollama, GENERATE: _stream_ollama}  # fmt: skip
