"""Greedy continuation of a sequence, one forward a token, for sessions that have nothing faster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.protocols import NO_DRAFT, Draft, Ints, Logits, Scores, Session
from edgespec.core.sampling import SamplingParams


class HostRows:
    """Scores whose rows [n, V] are in host memory and stay as they are."""

    waited_s = 0.0

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


def step_by_step(session: Session, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
    """`Session.rollout` by its other methods."""
    scores = session.forward(tokens[0], Draft.chain(tokens[1:]))
    rows = [scores.logits(len(tokens) - 1).copy()]
    session.commit(range(len(tokens) - 1))
    session.checkpoint()
    best = [int(rows[0][:vocab_size].argmax())]
    while len(best) < n:
        rows.append(session.forward(best[-1], NO_DRAFT).logits(0).copy())
        session.commit(())
        best.append(int(rows[-1][:vocab_size].argmax()))
    return Draft.chain(best), HostRows(rows)
