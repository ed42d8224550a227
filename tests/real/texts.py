"""Prompts for real models, and the comparison of their greedy answers with those of plain decoding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import edgespec
from edgespec.autopilot.speculation import Speculation
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.engine.engine import Engine
from edgespec.text.chat_template import Message

MODEL = "smollm2-135m"
IS_NIGHTLY = "EDGESPEC_NIGHTLY" in os.environ
"""Whether all prompts, drafters and samples are run, as `make nightly` does; else a part of each."""
ANSWER = "Hello! How can I assist you today?"  # to "hello", greedily
TIE = 1.0  # of two logits; the number of rows of a forward changes a logit by 0.5 (Q4_1) or 0.8 (Q4_K_M) here


@dataclass(frozen=True)
class Ask:
    """A prompt, which is a message of a chat or a text to continue, and how many tokens follow at most."""

    text: str
    is_chat: bool
    tokens: int

    def ask(self, model: edgespec.Model, **arguments: Any) -> edgespec.Reply:
        method = model.chat if self.is_chat else model.generate
        return method(self.text, **{"max_tokens": self.tokens, "temperature": 0, **arguments})


def list_asks() -> list[Ask]:
    """The beginnings of the 40 shortest shipped prompts as messages, and those of the next 20 as texts."""
    texts = sorted((prompt.turns[0] for prompt in read_shipped_prompts()), key=len)
    return [*(Ask(text[:160], True, 10) for text in texts[:40]), *(Ask(text[:80], False, 8) for text in texts[40:60])]


def load(draft: str, model: str = MODEL, **arguments: Any) -> edgespec.Model:
    return edgespec.load(model, draft=draft, **{"backend": "llamacpp", "threads": 1, "ctx": 1024, **arguments})


class Judge:
    """Shows how near two tokens are to each other where greedy answers differ. A context manager."""

    def __init__(self, path: Path) -> None:
        options = LoadOptions(threads=1, context_size=1024)
        model = open_model("llamacpp", path, options)
        self.engine = Engine(model, (), Speculation())
        self.gaps: list[float] = []

    def require_same(self, ask: Ask, plain: Sequence[int], other: Sequence[int]) -> None:
        """`other` are the tokens of `plain` up to a position where the logits of both differ by TIE at most, or by no
        more than rounding moves them there.
        """
        if tuple(other) == tuple(plain):
            return
        prompt = self.engine.encode((Message("user", ask.text),) if ask.is_chat else ask.text)
        session = self.engine.target.open_session()
        try:
            fork = first_divergence(session, prompt, plain, other)
        finally:
            session.close()
        assert fork is not None and fork.gap <= max(TIE, fork.noise), (ask, fork)
        self.gaps.append(fork.gap)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        print(f"\n{len(self.gaps)} answers left plain decoding's at a near-tie; gaps {self.gaps}")
        self.engine.close()
