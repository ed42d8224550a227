"""A draft model's sequence continued one forward a token; greedily in one call, for sessions with nothing faster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.arrays import Ints, Logits
from edgespec.core.protocols import NO_DRAFT, Draft, Scores, Session
from edgespec.core.sampling import SamplingParams


class HostScores:
    """Scores whose rows [n, V] are in host memory and stay as they are."""

    waited_s = peer_wait_s = 0.0
    peer_rows = 0

    def __init__(self, rows: Sequence[Logits]) -> None:
        self._rows = rows

    def argmax(self) -> Ints:
        return np.array([row.argmax() for row in self._rows], np.int32)

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        return None

    def logits(self, row: int) -> Logits:
        return self._rows[row]

    def hidden(self) -> object:
        return None


def read_prompt(session: Session, tokens: Sequence[int]) -> Scores:
    """Run `Session.prefill` to its end: the scores of the last token. Raises what it raises."""
    progress = session.prefill(tokens)
    while True:
        try:
            next(progress)
        except StopIteration as end:
            scores: Scores = end.value
            return scores


def score_tokens(session: Session, tokens: Sequence[int]) -> Logits:
    """Run and keep `tokens`, and make where they end a checkpoint: [V] scores of the last, a copy."""
    last = len(tokens) - 1
    logits = session.forward(tokens[0], Draft.chain(tokens[1:])).logits(last).copy()
    session.commit(range(last))
    session.checkpoint()
    return logits


def decode_one(session: Session, token: int) -> Logits:
    """Run and keep one more token: [V] scores after it, a copy."""
    logits = session.forward(token, NO_DRAFT).logits(0).copy()
    session.commit(())
    return logits


def resized(logits: Logits, vocab_size: int) -> Logits:
    """[vocab_size] a draft's scores cut or filled to the target's ids; those it lacks cannot be drafted."""
    missing = vocab_size - len(logits)
    return logits[:vocab_size] if missing <= 0 else np.pad(logits, (0, missing), constant_values=-np.inf)


def greedy_rollout(session: Session, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
    """`Session.rollout` by its other methods."""
    rows = [score_tokens(session, tokens)]
    best = [int(rows[0][:vocab_size].argmax())]
    while len(best) < n:
        rows.append(decode_one(session, best[-1]))
        best.append(int(rows[-1][:vocab_size].argmax()))
    return Draft.chain(best), HostScores(rows)
