"""Whether two models compute one function: greedy tokens and logits, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from edgespec.backends import BackendName, Model, open_model
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
    """Of `tokens` greedy tokens of a model, the `equal` ones are the other model's best after the same text, too.

    faults   differences that rounding does not explain: the model's own logits of the two tokens are further apart
    largest  difference of any logit
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
    """On the runtime that the path's form belongs to."""
    options = LoadOptions(context_size=512)
    backend: BackendName = "mlx" if path.is_dir() else "llamacpp"
    return open_model(backend, path, options, progress=lambda f: None, check=lambda: None)


def compare(model: Model, other: Model, rounding: float, tokens: int) -> Agreement:
    """Follow `tokens` greedy tokens of `model` after each of PROMPTS. Raises click.ClickException.

    `rounding` is the share of the largest logit that `other` may be off because of how its numbers are stored; with
    infinity no difference is a fault.
    """
    equal = faults = 0
    largest = 0.0
    sessions = [each.open_session(lambda: None) for each in (model, other)]
    for prompt in PROMPTS:
        ids = encode_prompt(model.tokenizer, prompt, parse_special=True)
        if ids != encode_prompt(other.tokenizer, prompt, parse_special=True):
            raise click.ClickException(f"the two tokenizers cut {prompt!r} differently.")
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
    """[tokens][sessions][V] scores along the greedy output of the first session."""
    for session in sessions:
        session.rewind(0)
        for _ in session.prefill(ids[:-1]):
            pass
    rows: list[list[Logits]] = []
    token = ids[-1]
    for _ in range(tokens):
        rows.append([_next(session, token) for session in sessions])
        token = int(rows[-1][0].argmax())
    return rows


def _next(session: Session, token: int) -> Logits:
    """[V] scores after one more token."""
    z = session.forward(token, NO_DRAFT).logits(0).copy()
    session.commit(())
    return z
