"""Finds where two greedy outputs diverge, and whether that is a near-tie of the target or an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgespec.core.arrays import Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import Capabilities, Draft, Session

# Ways to decode the text before the position: how many of its last tokens are decoded in steps, while the others are
# read as a prompt, and how many tokens a step has: a root and accepted ones. The first way is a forward of one row.
_WAYS = ((0, 1), (24, 1), (24, 4))


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position (of the outputs, from 0) where they differ.

    gap    difference of the two tokens' logits in a forward of one row
    noise  largest change of a logit at this position by how the tokens before it are decoded: one by one, in bursts,
           or as a prompt
    """

    position: int
    gap: float
    noise: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference: each of the two logits may change by `noise`."""
        return self.gap <= 2 * self.noise

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "near_tie": self.is_near_tie}


def first_divergence(
    session: Session, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """Compare two greedy outputs for `prompt`; None if one is a prefix of the other."""
    for i, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            history = [*prompt, *plain[:i]]
            ways = np.stack([_score(session, history, *way) for way in _WAYS])
            gap = abs(float(ways[0, a] - ways[0, b]))
            return Divergence(i, gap, float((ways.max(axis=0) - ways.min(axis=0)).max()))
    return None


def _score(session: Session, history: Sequence[int], n_decoded: int, burst: int) -> Logits:
    """[V] logits after `history`, whose last tokens are accepted in bursts, in a tree after a rejected branch."""
    n_bursts = min(n_decoded, len(history) - 1) // burst
    start = len(history) - 1 - n_bursts * burst
    session.rewind(0)
    scores = read_prompt(session, history[: max(start, 1)])
    if len(history) == 1:
        return scores.logits(0).copy()
    for i in range(session.position, len(history) - burst, burst):
        root, *rest = history[i : i + burst]
        has_branch = session.capabilities.tree and bool(rest)
        session.forward(root, _with_rejected_branch(rest, session.capabilities) if has_branch else Draft.chain(rest))
        session.commit(range(2, 2 + len(rest)) if has_branch else range(len(rest)))
    missing = history[session.position :]
    scores = session.forward(missing[0], Draft.chain(missing[1:]))
    z = scores.logits(len(missing) - 1).copy()
    session.commit(range(len(missing) - 1))
    return z


def _with_rejected_branch(tokens: Sequence[int], capabilities: Capabilities) -> Draft:
    """`tokens` as a chain, after another branch of two nodes."""
    other = (tokens[0] + 1) % capabilities.vocab_size
    parents = [-1, 0, -1, *range(2, 1 + len(tokens))]
    return Draft(np.array([other, other, *tokens], np.int32), np.array(parents, np.int32))
