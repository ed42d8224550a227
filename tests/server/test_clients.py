"""Another client library: litellm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import PROMPT, Server


def test_litellm(pair: Server) -> None:
    import litellm

    expected = pair.ask("embedded", max_tokens=12).json()["choices"][0]["message"]["content"]
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    common: dict[str, Any] = {"messages": messages, "max_tokens": 12, "temperature": 0, "api_key": "x"}
    made: Any = litellm.completion(model="openai/embedded", api_base=f"{pair.url}/v1", **common)
    assert made.choices[0].message.content == expected
    stream: Any = litellm.completion(model="openai/embedded", api_base=f"{pair.url}/v1", stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    other: Any = litellm.completion(model="anthropic/embedded", api_base=pair.url, **common)
    assert other.choices[0].message.content == expected


def test_overflow_is_recognized(pair: Server) -> None:
    import litellm
    import openai

    messages: list[Any] = [{"role": "user", "content": "x = 1\n" * 2000}]
    with pytest.raises(openai.BadRequestError) as caught:
        pair.openai().chat.completions.create(model="embedded", messages=messages)
    body: Any = caught.value.body
    assert caught.value.code == "context_length_exceeded" and body["n_prompt_tokens"] > body["n_ctx"] == 512
    for model, url in (("openai/embedded", f"{pair.url}/v1"), ("anthropic/embedded", pair.url)):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(model=model, api_base=url, api_key="x", messages=messages)
