"""/v1/embeddings, called with the openai client, and Ollama's paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from tests.server.serving import Server

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
    older = pair.post("/api/embeddings", json={"model": MODEL, "prompt": TEXTS[0]}).json()
    assert older == {"embedding": one["embeddings"][0]}
    for body in ({"input": "word " * 5000}, {"input": "x", "dimensions": 8}, {"input": [1]}):
        refused = pair.post("/api/embed", json={"model": MODEL, **body})
        assert refused.status_code == 400 and isinstance(refused.json()["error"], str)


def test_answers_go_on_meanwhile(pair: Server) -> None:
    with pair.openai().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=300, stream=True
    ) as stream:
        next(iter(stream))
        assert len(vectors(pair, TEXTS * 3)) == 9
    assert pair.ask(MODEL, max_tokens=3).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "empty"),
        ({"input": ["x", ""]}, "empty"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "empty"),
        ({"input": "word " * 5000}, "maximum context length is 512"),
        ({"input": "x" * 10**7}, "maximum context length is 512"),
        ({"input": [10**6]}, "token ids go from 0"),
        ({"input": [-1]}, "input"),
        ({"input": ["x"] * 3000}, "more than 2,048"),
        ({"input": "x", "dimensions": 8}, "own size"),
        ({"input": "x", "encoding_format": "hex"}, "float"),
        ({}, "Field required"),
    ],
)
def test_invalid_inputs_are_rejected(body: Any, message: str, pair: Server) -> None:
    answer = pair.post("/v1/embeddings", json={"model": MODEL, **body})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    assert pair.post("/v1/embeddings", json={"model": MODEL, "input": "x"}).status_code == 200


def test_a_runtime_that_makes_none_says_so(small: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        small.openai().embeddings.create(model="tree", input="x")
