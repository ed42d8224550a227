"""Decoding steps of a session: read a prompt, score tokens, decode one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.arrays import Logits
from edgespec.core.protocols import NO_DRAFT, Draft, Session
from edgespec.core.scores import Scores


def read_prompt(session: Session, tokens: Sequence[int]) -> Scores:
    """Run `Session.prefill` to its end; returns the scores of the last token. Raises what prefill raises."""
    progress = session.prefill(tokens)
    while True:
        try:
            next(progress)
        except StopIteration as end:
            scores: Scores = end.value
            return scores


def score_tokens(session: Session, tokens: Sequence[int]) -> Logits:
    """Run `tokens`, keep them and set a checkpoint after them; returns a copy of the last token's logits [V]."""
    last = len(tokens) - 1
    logits = session.forward(tokens[0], Draft.chain(tokens[1:])).logits(last).copy()
    session.commit(range(last))
    session.checkpoint()
    return logits


def decode_one(session: Session, token: int) -> Logits:
    """Run `token` and keep it; returns a copy of its logits [V]."""
    logits = session.forward(token, NO_DRAFT).logits(0).copy()
    session.commit(())
    return logits


def resize_logits(logits: Logits, vocab_size: int) -> Logits:
    """[vocab_size] a draft model's logits, cut or padded with -inf to the target's ids."""
    missing = vocab_size - len(logits)
    return logits[:vocab_size] if missing <= 0 else np.pad(logits, (0, missing), constant_values=-np.inf)
