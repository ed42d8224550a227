"""The names of models and tools in calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.server.serving import PROMPT, SMALL, Server, serving

USER: list[Any] = [{"role": "user", "content": PROMPT}]


def test_a_name_of_null_is_none(small: Server) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
    ):
        answer = small.post(path, json={"model": None, "max_tokens": 2, **body})
        assert answer.status_code == 200 and answer.json()["model"] == "tree", answer.text


def test_the_only_model_answers_to_any_name(small: Server) -> None:
    listed = small.get("/v1/models").json()
    assert listed == small.get("/v1/models").json()
    (model,) = listed["data"]
    assert model["id"] == "tree" and model["context_length"] == 256
    assert small.get("/v1/models/tree").json() == model and small.get("/v1/models/gpt-4").status_code == 404
    made = small.openai().chat.completions.create(model="gpt-4", messages=USER, max_tokens=3)
    assert made.model == "gpt-4" and made.usage and made.usage.completion_tokens
    message = small.anthropic().messages.create(model="claude", max_tokens=3, messages=USER)
    assert message.model == "claude" and message.content
    for path, body in (
        ("chat/completions", {"messages": USER, "max_tokens": 3}),
        ("completions", {"prompt": PROMPT, "max_tokens": 3}),
        ("responses", {"input": PROMPT, "max_output_tokens": 3}),
        ("messages", {"messages": USER, "max_tokens": 3}),
    ):
        assert small.post(f"/v1/{path}", json=body).json()["model"] == "tree", path
    assert small.post("/v1/messages/count_tokens", json={"messages": USER}).json()["input_tokens"] > 0
    assert small.post("/models/unload", json={"model": "gpt-4"}).status_code == 404


@pytest.mark.parametrize("arguments", [(*SMALL, "--strict-names"), ("one=tree", *SMALL)], ids=["strict", "two models"])
def test_unknown_names_are_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with serving(tmp_path, *arguments) as server:
        with pytest.raises(openai.NotFoundError, match=r"no model '../etc' here. There are: .*tree"):
            server.openai().chat.completions.create(model="../etc", messages=USER)
        with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude'"):
            server.anthropic().messages.create(model="claude", max_tokens=3, messages=USER)
        response = server.post("/v1/completions", json={"prompt": PROMPT})
        assert response.status_code == 404 and "names no model" in response.json()["error"]["message"]


def test_a_model_of_that_name_comes_before_the_second_name_of_another(tmp_path: Path) -> None:
    with serving(tmp_path, "python-6m=tree", "embedded=tree", *SMALL[1:]) as server:
        assert server.ask("python-6m", max_tokens=3).status_code == 200
        assert server.get("/v1/models/python-6m:latest").json()["id"] == "python-6m"
    with serving(tmp_path, "python-6m=tree", "other=tree", *SMALL[1:]) as server:
        assert server.ask("python-6m", max_tokens=3).status_code == 200


@pytest.mark.parametrize("name", ["get weather", "météo", "", "x" * 257])
def test_names_that_cannot_be_called(name: str, small: Server) -> None:
    function = {"name": name, "parameters": {"type": "object"}}
    chat: dict[str, Any] = {"messages": USER, "max_tokens": 3}
    for path, body in (
        ("v1/chat/completions", {**chat, "tools": [{"type": "function", "function": function}]}),
        ("v1/chat/completions", {**chat, "functions": [function]}),
        ("v1/responses", {"input": PROMPT, "tools": [{"type": "function", **function}]}),
        ("v1/messages", {**chat, "tools": [{"name": name, "input_schema": function["parameters"]}]}),
        ("api/chat", {"messages": USER, "tools": [{"type": "function", "function": function}]}),
    ):
        response = small.post(f"/{path}", json={"model": "tree", **body})
        said = f"the tool name '{name[:100]}' cannot be called. Use 1 to 256 ASCII letters"
        assert response.status_code == 400 and said in response.text, response.text
