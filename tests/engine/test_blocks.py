"""Blocks of an answer that follow a grammar: the text around them is what it is without them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load as load_toy
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import AnswerStart, Finished, Request
from edgespec.engine.structure import Json, Structure
from edgespec.text.chat_template import Message
from tests.engine.conftest import PLAIN, generate, list_loaded

BLOCK: dict[str, Any] = {"opening": "nn", "structure": Structure(((Json('{"enum": [1, 23, 235]}'), "]"),))}
WAYS = (Speculation(("ngram",), 4), Speculation(("model",), 3, None, "sample"), Speculation(("model",), 2, 5))


@pytest.fixture(scope="module")
def toy() -> Engine:
    options = LoadOptions(context_size=1024)
    return Engine(load_toy("tree", options), list_loaded(model=load_toy("draft", options)), PLAIN)


def write(engine: Engine, way: Speculation, **fields: Any) -> tuple[str, Finished]:
    engine.speculation = way
    return generate(engine, Request("so ", max_tokens=120, **fields))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_blocks_follow_the_grammar_and_drafts_change_nothing(temperature: float, toy: Engine) -> None:
    n_blocks = n_accepted = 0
    for seed in range(12):
        fields = {"sampling": SamplingParams(temperature=temperature), "seed": seed}
        free, _ = write(toy, PLAIN, **fields)
        text, _ = write(toy, PLAIN, **BLOCK, **fields)
        assert "nn" in free and text[: free.index("nn") + 2] == free[: free.index("nn") + 2]
        *blocks, last = text.split("nn")[1:]
        assert all(re.match(r"(1|23|235)\]", each) for each in blocks), text
        assert any(f"{value}]".startswith(last[:4]) or last.startswith(f"{value}]") for value in (1, 23, 235)), text
        n_blocks += len(blocks)
        for way in WAYS:
            drafted, finished = write(toy, way, **BLOCK, **fields)
            assert drafted == text, way
            n_accepted += finished.metrics.accepted_tokens
    assert n_blocks > 12 and n_accepted > 200


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_drafts_keep_to_the_blocks_too(rule: Any, toy: Engine) -> None:
    for seed in range(12):
        text, _ = write(toy, Speculation(("model",), 3, None, rule), **BLOCK, seed=seed)
        assert all(re.match(r"(1|23|235)\]", each) for each in text.split("nn")[1:-1]), text


def test_an_opening_in_the_reasoning_or_in_the_prompt_is_text() -> None:
    target = load_toy("tree", LoadOptions(context_size=1024))
    target.chat_template = "{{ messages[0].content }}{# <think></think> #}"
    chat = (Message("user", "ta"),)
    engine = Engine(target, [], PLAIN)
    request = Request(chat, max_tokens=120, seed=1, **BLOCK, start=AnswerStart("", "so "))
    text, _ = generate(engine, request)
    assert "]" not in text
    assert "]" in generate(engine, Request(chat, max_tokens=120, seed=1, **BLOCK))[0]


def test_what_the_opening_s_last_token_holds_beyond_it_belongs_to_the_block(engine: Engine) -> None:
    """The trained pair writes "().__" as one token, which is not chosen where the grammar does not take its rest."""
    assert len(engine.target.tokenizer.encode("().__", parse_special=False)) == 1
    prompt, greedy = "class A:\n    def __init__", SamplingParams(temperature=0)
    engine.speculation = PLAIN
    free, _ = generate(engine, Request(prompt, greedy, 12))
    assert "().__init__" in free
    for text, written in ((".__new__", "().__new__"), ("other", "()other")):
        request = Request(prompt, greedy, 12, structure=Structure(((text,),)), opening="()")
        for engine.speculation in (PLAIN, Speculation(("model",), 3)):
            assert generate(engine, request)[0].startswith(free[: free.index("()")] + written)
