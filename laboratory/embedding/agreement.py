"""Compare two models that should compute the same function: greedy tokens and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.harness import load_model
from edgespec.backends import Model
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.core.arrays import Logits
from edgespec.core.protocols import NO_DRAFT, Session
from edgespec.text.chat_template import encode_prompt

PROMPTS = (
    "import os\nimport sys\n\n\ndef read_lines(path):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "The speed of light is",
    "[1, 2, 3] + [4, 5",
)


@dataclass(frozen=True)
class Agreement:
    """How far two models agree along one model's greedy output.

    tokens   tokens compared
    equal    tokens that are the other model's best after the same text too
    faults   differing tokens that rounding does not explain: the model's own logits of the two are too far apart
    largest  largest difference of any logit
    """

    tokens: int
    equal: int
    faults: int
    largest: float

    def __str__(self) -> str:
        near_ties = self.tokens - self.equal - self.faults
        others = f" ({near_ties} near-ties, {self.faults} beyond)" if self.equal < self.tokens else ""
        return f"{self.equal} of {self.tokens} tokens agree{others}; largest logit difference {self.largest:.4f}"


def open_for_check(path: Path) -> Model:
    """Load a GGUF file on llama.cpp, a folder on MLX. Raises EdgespecError."""
    return load_model("mlx" if path.is_dir() else "llamacpp", path, LoadOptions(context_size=512))


def compare(model: Model, other: Model, rounding: float, tokens: int) -> Agreement:
    """Follow `tokens` greedy tokens of `model` after each of PROMPTS. Raises click.ClickException.

    `rounding` is the error of a logit that storing `other` may cause, relative to the largest logit; with infinity no
    difference is a fault.
    """
    equal = faults = 0
    largest = 0.0
    sessions = [each.open_session() for each in (model, other)]
    for prompt in PROMPTS:
        ids = encode_prompt(model.tokenizer, prompt, parse_special=True)
        if ids != encode_prompt(other.tokenizer, prompt, parse_special=True):
            raise click.ClickException(f"the two tokenizers split {prompt!r} differently.")
        rows = _follow(sessions, ids, tokens)
        largest = max(largest, *(float(np.abs(mine - others).max()) for mine, others in rows))
        text = [int(mine.argmax()) for mine, _ in rows]
        for i, (mine, others) in enumerate(rows):
            allowed = rounding * float(np.abs(mine).max())
            if text[i] == others.argmax():
                equal += 1
            elif np.isfinite(allowed):
                fork = first_divergence(sessions[0], ids, text[: i + 1], [*text[:i], int(others.argmax())])
                faults += fork is not None and fork.gap > 2 * max(fork.noise, allowed)
    for session in sessions:
        session.close()
    return Agreement(tokens * len(PROMPTS), equal, faults, largest)


def _follow(sessions: Sequence[Session], ids: Sequence[int], tokens: int) -> list[list[Logits]]:
    """[tokens][sessions][V] logits along the first session's greedy output."""
    for session in sessions:
        session.rewind(0)
        for _ in session.prefill(ids[:-1]):
            pass
    rows: list[list[Logits]] = []
    token = ids[-1]
    for _ in range(tokens):
        rows.append([_forward(session, token) for session in sessions])
        token = int(rows[-1][0].argmax())
    return rows


def _forward(session: Session, token: int) -> Logits:
    """[V] logits after one more token."""
    z = session.forward(token, NO_DRAFT).logits(0).copy()
    session.commit(())
    return z
