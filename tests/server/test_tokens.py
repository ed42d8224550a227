"""Counts of tokens, tokens and prompts: those of llama.cpp's server, for which nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import ENDLESS, TOY, Server, serving

USER: Any = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def héllo():"}]


def test_a_text_becomes_tokens_and_is_the_same_again(pair: Server) -> None:
    text = "def héllo(x): return '🤗'"
    tokens = pair.post("/tokenize", json={"content": text}).json()["tokens"]
    assert len(tokens) > 5 and pair.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    described = pair.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [each["id"] for each in described] == tokens
    pieces = [each["piece"] for each in described]
    assert [195] in pieces, "half a character is bytes"
    assert b"".join(each.encode() if isinstance(each, str) else bytes(each) for each in pieces) == text.encode()
    assert pair.post("/tokenize", json={"content": ""}).json() == {"tokens": []}
    assert pair.post("/detokenize", json={"tokens": []}).json() == {"content": ""}


def test_control_tokens_are_spelled(toy: Server) -> None:
    assert toy.post("/detokenize", json={"tokens": [104, 105, 256]}).json() == {"content": "hi<end>"}
    refused = toy.post("/detokenize", json={"tokens": [1, 257]})
    assert refused.status_code == 400 and "257 tokens, and no 257" in refused.json()["error"]["message"]


def test_the_prompt_that_is_shown_is_the_one_that_is_counted_and_read(pair: Server) -> None:
    prompt = pair.post("/apply-template", json={"messages": USER}).json()["prompt"]
    assert "import os" in prompt and "def héllo():" in prompt
    tokens = pair.post("/tokenize", json={"content": prompt, "add_special": True}).json()["tokens"]
    answer = pair.ask("embedded", messages=USER, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    counted = pair.post("/v1/chat/completions/input_tokens", json={"messages": USER}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": len(tokens)}
    responses = pair.openai().responses.input_tokens.count(model="embedded", input=USER)
    messages = pair.anthropic().messages.count_tokens(model="embedded", system="import os", messages=USER[1:])
    assert responses.input_tokens == messages.input_tokens == len(tokens)
    begun = [*USER, {"role": "assistant", "content": "    pass"}]
    more = pair.post("/apply-template", json={"messages": begun, "continue_final_message": True}).json()["prompt"]
    assert more == f"{prompt}    pass"


def test_a_prompt_that_does_not_fit_is_counted(pair: Server) -> None:
    user: Any = [{"role": "user", "content": "x = 1\n" * 2000}]
    assert pair.anthropic().messages.count_tokens(model="embedded", messages=user).input_tokens > 512


def test_nobody_waits_for_a_count(tmp_path: Path) -> None:
    """The only slot decodes without end, and no request may wait for it."""
    counts = {
        "/v1/messages/count_tokens": {"messages": USER[1:]},
        "/v1/responses/input_tokens": {"input": "hi"},
        "/tokenize": {"content": "hi"},
        "/detokenize": {"tokens": [104]},
        "/apply-template": {"messages": USER},
    }
    with serving(tmp_path, *TOY, "--parallel", "1", "--queue", "0") as server:
        assert server.post("/tokenize", json={"content": "hi"}).json() == {"tokens": [104, 105]}, "it loads the model"
        body = {"messages": USER, "stream": True, **ENDLESS}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
            chunks = answer.iter_raw()
            next(chunks)
            assert server.ask("tree", max_tokens=1).status_code == 429
            assert [server.post(path, json=each).status_code for path, each in counts.items()] == [200] * len(counts)
            assert server.model("tree")["answering"] == 1
        server.until("tree", answering=0)
        assert 'edgespec_answers_total{ending="cancelled",model="tree"} 1.0' in server.get("/metrics").text
        assert server.post("/models/unload", json={"model": "tree"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": ["a"]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [1.5]}),
        ("/apply-template", {"messages": []}),
    ],
)
def test_what_is_refused(path: str, body: dict[str, Any], toy: Server) -> None:
    assert toy.post(path, json=body).status_code == 400
