"""Embeddings and counts of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.server.serving import ENDLESS, TOY, Server, serving

MODEL = "embedded"
TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "def plus(x, y):\n    return x + y\n",
    "import socket\n\nserver = socket.socket()\nserver.bind(('', 80))\n",
]


def vectors(server: Server, texts: Any, **more: Any) -> list[Any]:
    made = server.openai().embeddings.create(model=MODEL, input=texts, **more)
    assert made.model == MODEL and [each.index for each in made.data] == list(range(len(made.data)))
    return [np.array(each.embedding) for each in made.data]


def test_texts_become_vectors_of_length_one_and_like_ones_are_close(pair: Server) -> None:
    one, like, other = vectors(pair, TEXTS)
    for vector in (one, like, other):
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5) and len(vector) == len(one) > 50
    assert one @ like > one @ other + 0.05
    for text, vector in zip(TEXTS, (one, like, other), strict=True):
        np.testing.assert_array_equal(vectors(pair, text)[0], vector)  # alone as among others
    np.testing.assert_allclose(vectors(pair, TEXTS[0], encoding_format="float", dimensions=len(one))[0], one, atol=1e-7)


def test_usage_counts_tokens_and_ids_are_taken_for_texts(pair: Server) -> None:
    made = pair.openai().embeddings.create(model=MODEL, input=["a" * 40, "b"])
    assert made.usage.prompt_tokens == made.usage.total_tokens > 2
    one, two = vectors(pair, [[7, 8, 9], [9, 8, 7]])
    assert np.abs(one - two).max() > 0.01
    np.testing.assert_array_equal(vectors(pair, [7, 8, 9])[0], one)


def test_ollamas_paths(pair: Server) -> None:
    wanted = vectors(pair, TEXTS[:2])
    many = pair.post("/api/embed", json={"model": f"{MODEL}:latest", "input": TEXTS[:2], "truncate": True}).json()
    np.testing.assert_allclose(many["embeddings"], wanted, atol=1e-7)
    assert many["prompt_eval_count"] > 20 and many["total_duration"] > 1000
    one = pair.post("/api/embed", json={"model": MODEL, "input": TEXTS[0]}).json()
    np.testing.assert_array_equal(one["embeddings"], many["embeddings"][:1])
    assert pair.post("/api/embed", json={"model": MODEL, "input": []}).json()["embeddings"] == []
    long = [1, 2, 3, *range(1_000)] * 60
    cut = pair.post("/api/embed", json={"model": MODEL, "input": [long]}).json()
    size = cut["prompt_eval_count"]
    np.testing.assert_array_equal(cut["embeddings"], vectors(pair, [long[:size]]))
    refused = pair.post("/api/embed", json={"model": MODEL, "input": [long], "truncate": False})
    assert refused.status_code == 400 and f"length is {size} tokens" in refused.text
    assert pair.post("/api/embed", json={"model": MODEL, "input": "word " * 10**6}).status_code == 200
    older = pair.post("/api/embeddings", json={"model": MODEL, "prompt": TEXTS[0]}).json()
    assert older == {"embedding": one["embeddings"][0]}


def test_a_runtime_that_makes_none_says_so(small: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        small.openai().embeddings.create(model="tree", input="x")


USER: Any = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def héllo():"}]


def test_the_prompt_that_is_counted_is_the_one_that_is_read(pair: Server) -> None:
    answer = pair.ask("embedded", messages=USER, max_tokens=1).json()
    n_read = answer["usage"]["prompt_tokens"]
    counted = pair.post("/v1/chat/completions/input_tokens", json={"messages": USER}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": n_read}
    responses = pair.openai().responses.input_tokens.count(model="embedded", input=USER)
    messages = pair.anthropic().messages.count_tokens(model="embedded", system="import os", messages=USER[1:])
    assert responses.input_tokens == messages.input_tokens == n_read
    begun = {"messages": [*USER, {"role": "assistant", "content": "    pass"}], "continue_final_message": True}
    more = pair.post("/v1/chat/completions/input_tokens", json=begun).json()
    assert more["input_tokens"] > n_read


def test_a_prompt_that_does_not_fit_is_counted(pair: Server) -> None:
    user: Any = [{"role": "user", "content": "x = 1\n" * 2000}]
    assert pair.anthropic().messages.count_tokens(model="embedded", messages=user).input_tokens > 512


def test_nobody_waits_for_a_count(tmp_path: Path) -> None:
    """The only slot decodes without end, and no request may wait for it."""
    counts = {
        "/v1/messages/count_tokens": {"messages": USER[1:]},
        "/v1/responses/input_tokens": {"input": "hi"},
        "/v1/chat/completions/input_tokens": {"messages": USER},
    }
    with serving(tmp_path, *TOY, "--parallel", "1", "--queue", "0") as server:
        assert server.post("/v1/responses/input_tokens", json={"input": "hi"}).status_code == 200, "it loads the model"
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
