"""The names of models and tools in calls."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.errors import UnknownModel
from edgespec.models.load_config import LoadConfig
from edgespec.server.http import Policy
from edgespec.server.metrics import ServerMetrics
from edgespec.server.models import LocalModel, Models
from tests.server.serving import PROMPT, Server

USER: list[Any] = [{"role": "user", "content": PROMPT}]


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
        for more in ({}, {"model": None}):
            assert small.post(f"/v1/{path}", json={**body, **more}).json()["model"] == "tree", path
    assert small.post("/v1/messages/count_tokens", json={"messages": USER}).json()["input_tokens"] > 0
    assert small.post("/models/unload", json={"model": "gpt-4"}).status_code == 404


def test_names_that_no_model_has() -> None:
    config, aliases = LoadConfig("tree", backend="toy"), {"python-6m": "embedded"}

    def choose(name: str, *names: str) -> str:
        models = Models(dict.fromkeys(names, LocalModel(config)), Policy(), ServerMetrics(), aliases)
        return models.choose(name).name

    assert choose("gpt-4", "tree") == choose("", "tree") == "tree"
    assert choose("python-6m", "embedded", "tree") == "embedded"
    assert choose("python-6m:latest", "embedded", "python-6m") == "python-6m", "not the second name of another"
    with pytest.raises(UnknownModel, match=r"there is no model '../etc' here") as caught:
        choose("../etc", "tree", "one")
    assert "tree" in caught.value.hint
    with pytest.raises(UnknownModel, match="names no model"):
        choose("", "tree", "one")
