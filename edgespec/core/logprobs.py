"""How probable emitted tokens were to the model itself: told beside any verifier, from the same scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.arrays import Logits
from edgespec.core.protocols import Draft, Scores, Verdict, Verifier
from edgespec.core.sampling import top_k


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token with its natural logarithm of probability at temperature 1, and the most probable ones in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Scoring:
    """Another verifier; remembers the scores of what it lets through."""

    def __init__(self, verifier: Verifier, n_top: int) -> None:
        self._verifier = verifier
        self._n_top = n_top
        self._last: list[TokenScore] = []

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        verdict = self._verifier.verify(draft, scores, prefix)
        rows = [0, *(node + 1 for node in verdict.path)]
        tokens = [*(int(draft.tokens[node]) for node in verdict.path), verdict.next_token]
        self._last = [self._score(scores.logits(row), token) for row, token in zip(rows, tokens, strict=True)]
        return verdict

    def take(self, count: int) -> tuple[TokenScore, ...]:
        """The scores of the first `count` tokens of the last verdict, of which fewer may have been emitted."""
        return tuple(self._last[:count])

    def _score(self, logits: Logits, token: int) -> TokenScore:
        best = float(logits.max())
        norm = best + float(np.log(np.exp(logits - best, dtype=np.float64).sum()))
        top: list[tuple[int, float]] = []
        if self._n_top:
            ids = top_k(logits, min(self._n_top, len(logits)))
            order = ids[np.argsort(-logits[ids], kind="stable")]
            top = [(int(i), float(logits[i]) - norm) for i in order]
        return TokenScore(token, float(logits[token]) - norm, tuple(top))
