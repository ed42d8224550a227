"""A prompt that is too long is told in the words and codes by which clients recognize it."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from tests.server.serving import Server

WORDS = {"long": "word " * 600, "far too long": "word " * 40_000}


@pytest.mark.parametrize("text", WORDS.values(), ids=list(WORDS))
def test_every_interface(text: str, pair: Server) -> None:
    user: Any = [{"role": "user", "content": text}]
    client = pair.openai()
    for ask in (
        lambda: client.chat.completions.create(model="embedded", messages=user),
        lambda: client.completions.create(model="embedded", prompt=text),
        lambda: client.responses.create(model="embedded", input=text),
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as caught:
            ask()
        body: Any = caught.value.body
        assert body["code"] == "context_length_exceeded" and body["type"] == "invalid_request_error"
        assert body["n_ctx"] == 512 < body["n_prompt_tokens"] and "/clear" not in body["message"]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 512 maximum") as refused:
        pair.anthropic().messages.create(model="embedded", max_tokens=5, messages=user)
    told: Any = refused.value.body
    assert told["error"]["type"] == "invalid_request_error"


def test_litellm_recognizes_it(pair: Server) -> None:
    import litellm

    user: Any = [{"role": "user", "content": WORDS["long"]}]
    for model, base in (("openai/embedded", f"{pair.url}/v1"), ("anthropic/embedded", pair.url)):
        for stream in (False, True):
            with pytest.raises(litellm.ContextWindowExceededError):
                litellm.completion(model=model, api_base=base, api_key="x", messages=user, stream=stream, num_retries=0)
