"""Where two greedy outputs part, and whether the target was undecided there: a near-tie or a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.protocols import NO_DRAFT, Draft, Logits, Session


@dataclass(frozen=True, slots=True)
class Fork:
    """The first position (of the outputs, from 0) where they differ, and the target's logits there.

    gap    what separates the two tokens in a forward of one row
    noise  the largest change of any logit between a forward of one row and one of many, at that position
    """

    position: int
    gap: float
    noise: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone explains the fork: each of the two logits may move by `noise`."""
        return self.gap <= 2 * self.noise


def first_fork(session: Session, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Fork | None:
    """Compare two outputs of greedy decoding for `prompt`; None where one is a prefix of the other."""
    for i, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            history = [*prompt, *plain[:i]]
            alone, among = _row_alone(session, history), _row_among_others(session, history)
            return Fork(i, abs(float(alone[a] - alone[b])), float(np.abs(alone - among).max()))
    return None


def _row_alone(session: Session, history: Sequence[int]) -> Logits:
    """[V] scores after `history` from a forward of one row."""
    _prefill(session, history[:-1])
    scores = session.forward(history[-1], NO_DRAFT)
    z = scores.logits(0).copy()
    session.commit(())
    return z


def _row_among_others(session: Session, history: Sequence[int]) -> Logits:
    """[V] the same from a forward of up to eight rows."""
    rows = min(8, len(history) - 1, session.draft_limit + 1)
    _prefill(session, history[:-rows])
    scores = session.forward(history[-rows], Draft.chain(history[len(history) - rows + 1 :]))
    z = scores.logits(rows - 1).copy()
    session.commit(range(rows - 1))
    return z


def _prefill(session: Session, tokens: Sequence[int]) -> None:
    for _ in session.prefill(tokens):
        pass
