"""Several answers to one request run at once; each is what it would be alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.serving import ENDLESS, TOY, Server, serving

PROMPTS = ["x = 1\n", "import os\n"]


def complete(server: Server, prompt: str | list[str], **more: Any) -> httpx.Response:
    return server.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24, **more})


@contextmanager
def streaming(server: Server, prompt: str | list[str], **more: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The chunks of a stream."""
    body = {"prompt": prompt, "stream": True, **more}

    def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))

    with (
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response,
        closing(chunks(response)) as found,
    ):
        yield found


def test_each_answer_is_what_it_is_alone(toy: Server) -> None:
    made = complete(toy, PROMPTS, n=3, seed=5, logprobs=0).json()
    alone = [complete(toy, each, seed=5 + copy, logprobs=0).json() for each in PROMPTS for copy in range(3)]
    assert [choice["index"] for choice in made["choices"]] == list(range(6))
    assert [choice["text"] for choice in made["choices"]] == [each["choices"][0]["text"] for each in alone]
    usages = [each["usage"] for each in alone]
    assert made["usage"]["completion_tokens"] == sum(each["completion_tokens"] for each in usages)
    assert made["usage"]["prompt_tokens"] == usages[0]["prompt_tokens"] + usages[3]["prompt_tokens"]
    texts = [""] * 6
    options = {"include_usage": True}
    with streaming(toy, PROMPTS, n=3, seed=5, max_tokens=24, stream_options=options) as chunks:
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in made["choices"]]
    assert {**chunk["usage"], "prompt_tokens_details": None} == {**made["usage"], "prompt_tokens_details": None}


def test_they_run_at_once_and_end_together(toy: Server) -> None:
    with streaming(toy, PROMPTS[0], n=2, **ENDLESS) as chunks:
        seen = set[int]()
        while seen != {0, 1}:
            seen |= {choice["index"] for choice in next(chunks)["choices"]}
    toy.until("tree", answering=0, waiting=0)


def test_one_that_fails_ends_the_others_with_one_error(small: Server) -> None:
    prompts = [PROMPTS[0], "x" * 600]
    endless = {**ENDLESS, "max_tokens": 200}
    whole = complete(small, prompts, **endless)
    assert whole.status_code == 400 and whole.json()["error"]["code"] == "context_length_exceeded"
    streamed = complete(small, prompts, stream=True, **endless).text
    assert streamed.count('"context_length_exceeded"') == 1 and "[DONE]" not in streamed
    small.until("tree", answering=0, waiting=0)


def test_a_request_has_one_place_in_the_queue(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY, "--parallel", "1", "--queue", "1") as server, ThreadPoolExecutor(1) as pool:
        with streaming(server, "x", **ENDLESS) as chunks:
            next(chunks)
            many = pool.submit(complete, server, PROMPTS, n=4, max_tokens=2)
            server.until("tree", answering=1, waiting=1)
            assert complete(server, "x").status_code == 429
        assert [choice["index"] for choice in many.result(60).json()["choices"]] == list(range(8))
