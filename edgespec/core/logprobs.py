"""Log probabilities of emitted tokens under the model, from the scores that a verifier reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.arrays import Logits
from edgespec.core.protocols import Draft, Verdict, Verifier
from edgespec.core.rng import sum_blocks
from edgespec.core.scores import Scores
from edgespec.core.truncation import highest, top_k


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its natural log probability at temperature 1, and the most probable (token, log probability) pairs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobRecorder:
    """A Verifier that wraps another and records the log probabilities of the tokens in its verdicts."""

    def __init__(self, verifier: Verifier, n_top: int) -> None:
        """`n_top`: how many of the most probable tokens to record for each."""
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
        """The first `count` tokens of the last verdict, which may have been cut when it was emitted."""
        return tuple(self._last[:count])

    def _score(self, logits: Logits, token: int) -> TokenScore:
        best = highest(logits)
        weights = logits - best
        norm = float(best) + math.log(sum_blocks(np.exp(weights, out=weights)).sum())
        top: list[tuple[int, float]] = []
        if self._n_top:
            ids = top_k(logits, min(self._n_top, len(logits)))
            order = ids[np.argsort(-logits[ids], kind="stable")]
            top = [(int(i), float(logits[i]) - norm) for i in order]
        return TokenScore(token, float(logits[token]) - norm, tuple(top))
