"""Find where two greedy outputs diverge, and whether that is a near-tie of the target or an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.arrays import Logits
from edgespec.core.greedy import read_prompt
from edgespec.core.protocols import NO_DRAFT, Capabilities, Draft, Session

_BURST = 4  # tokens of a step: the root and three accepted


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position (of the outputs, from 0) where they differ.

    gap    difference of the two tokens' logits in a forward of one row
    noise  largest change of a logit at this position if the tokens before it are decoded in bursts
    """

    position: int
    gap: float
    noise: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference: each of the two logits may change by `noise`."""
        return self.gap <= 2 * self.noise


def first_divergence(
    session: Session, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """Compare two greedy outputs for `prompt`; None if one is a prefix of the other."""
    for i, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            history = [*prompt, *plain[:i]]
            alone, in_bursts = _score_alone(session, history), _score_in_bursts(session, history)
            return Divergence(i, abs(float(alone[a] - alone[b])), float(np.abs(alone - in_bursts).max()))
    return None


def _score_alone(session: Session, history: Sequence[int]) -> Logits:
    """[V] logits after `history`, by a forward of one row."""
    session.rewind(0)
    read_prompt(session, history[:-1])
    scores = session.forward(history[-1], NO_DRAFT)
    z = scores.logits(0).copy()
    session.commit(())
    return z


def _score_in_bursts(session: Session, history: Sequence[int]) -> Logits:
    """[V] logits after `history`, whose last tokens are accepted in bursts, in a tree after a rejected branch."""
    n_bursts = min(6, (len(history) - 1) // _BURST)
    start = len(history) - 1 - n_bursts * _BURST
    session.rewind(0)
    read_prompt(session, history[: max(start, 1)])
    for i in range(session.position, len(history) - 1 - _BURST + 1, _BURST):
        root, *rest = history[i : i + _BURST]
        session.forward(root, _with_rejected_branch(rest, session.capabilities))
        session.commit(range(len(rest)) if not session.capabilities.tree else range(2, 2 + len(rest)))
    missing = history[session.position :]
    scores = session.forward(missing[0], Draft.chain(missing[1:]))
    z = scores.logits(len(missing) - 1).copy()
    session.commit(range(len(missing) - 1))
    return z


def _with_rejected_branch(tokens: Sequence[int], capabilities: Capabilities) -> Draft:
    """`tokens` as a chain; if the session supports trees, after another branch of two nodes."""
    if not capabilities.tree:
        return Draft.chain(tokens)
    other = (tokens[0] + 1) % capabilities.vocab_size
    parents = [-1, 0, -1, *range(2, 1 + len(tokens))]
    return Draft(np.array([other, other, *tokens], np.int32), np.array(parents, np.int32))
