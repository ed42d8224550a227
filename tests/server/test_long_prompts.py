"""What clients see of a long prompt: progress while it is read, what of it was cached, and why the rest was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import run_command
from tests.server.interfaces import CHAT, CHATS, GENERATE, OLLAMA, TEXT, make_body, stream
from tests.server.serving import Server

LONG = "A long text, of which the toy reads a part at a time. " * 60
RULES = " ".join(f"Rule {i} is to do {i * i}." for i in range(60))


def read_lines(server: Server, path: str, prompt: str, **more: Any) -> list[str]:
    response = server.post(path, json=make_body(path, prompt, stream=True, limit=4, model="tree", **more))
    assert response.status_code == 200, response.text
    return response.text.splitlines()


@pytest.mark.parametrize("path", [*CHATS, TEXT, GENERATE])
def test_a_stream_says_how_far_a_prompt_has_been_read(toy: Server, path: str) -> None:
    """In comments, which no client sees; a stream of JSON lines has no place for them."""
    prompt = f"{path} {LONG}"
    comments = [line for line in read_lines(toy, path, prompt) if line.startswith(": reading ")]
    if path in (OLLAMA, GENERATE):
        assert not comments
    else:
        assert len(comments) > 3 and comments[-1].endswith("s left") and " tokens/s, " in comments[-1]
    assert stream(toy, path, f"again {prompt}", limit=4, model="tree").written == 4


def test_progress_as_events_where_it_is_asked_for(toy: Server) -> None:
    ask: Any = {
        "model": "tree",
        "messages": [{"role": "user", "content": f"events {LONG}"}],
        "max_tokens": 4,
        "seed": 1,
    }
    chunks = list(toy.openai().chat.completions.create(**ask, stream=True, extra_body={"return_progress": True}))
    found = [chunk.model_extra["prompt_progress"] for chunk in chunks if "prompt_progress" in (chunk.model_extra or {})]
    total, done = found[0]["total"], [each["processed"] for each in found]
    assert len(LONG) < total and len(done) > 3 and done == sorted(set(done)) and done[-1] < total
    assert all(each["cache"] < 20 and each["time_ms"] >= 0 and each["total"] == total for each in found)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text and chunks[-1].choices[0].finish_reason == "length"
    assert "prompt_progress" not in "\n".join(read_lines(toy, CHAT, f"none {LONG}"))


def test_why_a_prompt_was_read_again(toy: Server, tmp_path: Path) -> None:
    """The answer says it with the caller's own text; the log and `ps` say it without any."""

    def timings(system: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "go on"}]
        body = toy.post(CHAT, json={"model": "tree", "max_tokens": 4, "messages": messages}).json()
        assert isinstance(body["timings"], dict)
        return body["timings"]

    assert "cache_lost_n" not in timings(f"Today is the 25th. {RULES}")
    lost = timings(f"Today is the 26th. {RULES}")
    assert len(RULES) <= lost["cache_lost_n"] <= lost["prompt_n"]
    assert "in message 1 (system). " in lost["cache_lost_reason"] and "is the 2' comes before '6th. Rule 0" in str(lost)
    again = timings(f"Today is the 26th. {RULES}")
    assert "cache_lost_n" not in again and again["cache_n"] >= len(RULES)
    reason = "tokens of the prompt were read again: the text has changed at token"
    logged = [line for line in toy.log if reason in line]
    assert logged and f"cached={lost['cache_n']}" in logged[-1] and "6th" not in logged[-1]
    listed = run_command(["ps", "--url", toy.url], {}, tmp_path).stdout
    assert f"tree: {lost['cache_lost_n']:,} {reason}" in listed and "6th" not in listed
    assert "edgespec_reread_tokens_total" in toy.get("/metrics").text


def test_what_the_caches_hold(toy: Server) -> None:
    messages = [{"role": "user", "content": f"Now {RULES}"}]
    usage = toy.post(CHAT, json={"model": "tree", "max_tokens": 4, "messages": messages}).json()["usage"]
    slots = toy.get("/slots").json()
    assert [each["id"] for each in slots] == list(range(len(slots))) and {each["model"] for each in slots} == {"tree"}
    (used,) = [each for each in slots if each["n_prompt_tokens"] == usage["prompt_tokens"]]
    assert usage["prompt_tokens"] <= used["n_tokens"] < used["n_ctx"] and not used["is_processing"]
    changed = [{"role": "user", "content": f"Then {RULES}"}]
    toy.post(CHAT, json={"model": "tree", "max_tokens": 4, "messages": changed})
    lost = [each["cache_lost_n"] for each in toy.get("/slots").json() if each["cache_lost_reason"]]
    assert lost and lost[0] >= len(RULES)


def test_what_claude_code_adds_to_each_request_is_left_out(toy: Server) -> None:
    def usage(sign: str) -> dict[str, int]:
        blocks = [
            {"type": "text", "text": sign},
            {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}},
        ]
        body = {"model": "tree", "max_tokens": 4, "system": blocks, "messages": [{"role": "user", "content": "go"}]}
        answer = json.loads(toy.post("/v1/messages", json=body).text)
        return dict(answer["usage"])

    usage("x-anthropic-billing-header: cc_version=2.1; cch=1f0a9;")
    second = usage("x-anthropic-billing-header: cc_version=2.1; cch=77b31;")
    assert second["cache_read_input_tokens"] > len(RULES) and second["input_tokens"] < 20
