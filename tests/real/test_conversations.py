"""Conversations and constrained answers with drafts: what is read again, and that the text is plain decoding's.

With `exact`, since texts that are read in other portions would differ at near-ties.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import edgespec
from tests.real.texts import load

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add_person", "parameters": SCHEMA}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
FIRST, SECOND, OTHER = "Name three colours.", "And three more?", "Which is the warmest?"


@pytest.fixture(scope="module")
def model(folders: Path) -> Iterator[edgespec.Model]:
    with load("ngram", draft_max=4, exact=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(folders: Path) -> Iterator[edgespec.Model]:
    with load("none", exact=True) as opened:
        yield opened


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns_branches_and_cancelled_answers(model: edgespec.Model, plain: edgespec.Model) -> None:
    first = model.chat([user(FIRST)], **GREEDY)
    begun = [user(FIRST), first.message]
    second = model.chat([*begun, user(SECOND)], **GREEDY)
    known = first.stats.prompt_tokens + len(first.tokens)
    assert second.stats.cached_tokens >= known - 2, "the first turn is not read again"
    assert second.text == plain.chat([*begun, user(SECOND)], **GREEDY).text

    edited = model.chat([*begun, user(OTHER)], **GREEDY)
    assert known - 2 <= edited.stats.cached_tokens < second.stats.prompt_tokens
    assert edited.text == plain.chat([*begun, user(OTHER)], **GREEDY).text
    assert model.chat([*begun, user(SECOND)], **GREEDY).text == second.text, "the first branch is as it was"

    stream = model.stream([*begun, user(SECOND)], **GREEDY)
    heard = "".join(next(stream).text for _ in range(3))
    stream.close()
    again = model.chat([*begun, user(SECOND)], **GREEDY)
    assert again.text == second.text and again.text.startswith(heard)
    assert again.stats.cached_tokens >= known


def test_the_end_of_the_context() -> None:
    texts = []
    for draft, options in (("none", {}), ("ngram", {"draft_max": 4})):
        with load(draft, ctx=128, exact=True, **options) as small:
            reply = small.generate("one, two, one, two, one, two,", temperature=0)
            assert reply.finish_reason == "length"
            assert reply.stats.prompt_tokens + len(reply.tokens) in (128, 129)
            texts.append(reply.text)
            with pytest.raises(edgespec.PromptTooLong, match="128"):
                small.generate("one, two, " * 60)
            assert small.chat("hello", temperature=0).text.startswith("Hello!")
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("question", "arguments"),
    [
        ("Describe a person as JSON.", {"schema": SCHEMA}),
        ("Add Ada, who is 36.", {"tools": [TOOL], "tool_choice": "required"}),
        ("Count from one to ten.", {"stop": ["5", "five"]}),
    ],
    ids=["schema", "tool", "stop"],
)
def test_a_constrained_answer_is_plain_decodings(
    model: edgespec.Model, plain: edgespec.Model, question: str, arguments: dict[str, Any]
) -> None:
    replies = [each.chat(question, temperature=0, max_tokens=64, **arguments) for each in (plain, model)]
    assert replies[0].tokens == replies[1].tokens and replies[0].text == replies[1].text
    reply = replies[1]
    if "schema" in arguments:
        jsonschema.validate(json.loads(reply.text), SCHEMA)
    elif "tools" in arguments:
        (call,) = reply.tool_calls
        assert call.name == "add_person"
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    else:
        assert reply.stop in arguments["stop"] and reply.stop not in reply.text
