"""Log probabilities of tokens under the model, from the scores that a verifier reads."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.cancel import check_cancelled
from edgespec.core.arrays import Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.peers import YIELD, Yield
from edgespec.core.protocols import Draft, Session, Verdict, Verifier
from edgespec.core.scores import Scores
from edgespec.core.truncate import highest, top_k
from edgespec.core.weights import sum_blocks

_MAX_ROWS = 32  # rows of a forward that scores a text


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its natural log probability at temperature 1, and the most probable (token, log probability) pairs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobRecorder:
    """A Verifier that wraps another and records log probabilities.

    last  those of the tokens of the last verdict; if the text ends within the verdict, fewer of them are emitted
    """

    def __init__(self, verifier: Verifier, n_top: int) -> None:
        """`n_top`: how many of the most probable tokens to record for each."""
        self._verifier = verifier
        self._n_top = n_top
        self.last: list[TokenScore] = []

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        verdict = self._verifier.verify(draft, scores, prefix)
        rows = [0, *(node + 1 for node in verdict.path)]
        tokens = [*(int(draft.tokens[node]) for node in verdict.path), verdict.next_token]
        scored = zip(rows, tokens, strict=True)
        self.last = [score_token(scores.logits(row), token, self._n_top) for row, token in scored]
        return verdict


def score_token(logits: Logits, token: int, n_top: int) -> TokenScore:
    """The score of `token` under `logits`, with the `n_top` most probable tokens."""
    best = highest(logits)
    weights = logits - best
    norm = float(best) + math.log(sum_blocks(np.exp(weights, out=weights)).sum())
    ids = top_k(logits, min(n_top, len(logits))) if n_top else np.zeros(0, np.intp)
    order = ids[np.argsort(-logits[ids], kind="stable")]
    top = tuple((int(i), float(logits[i]) - norm) for i in order)
    return TokenScore(token, float(logits[token]) - norm, top)


def score_text(session: Session, tokens: Sequence[int], n_top: int) -> Generator[Yield, None, list[TokenScore]]:
    """The scores of all `tokens` but the first, read as drafts that are kept. The cache then holds all but the last.

    Raises Cancelled, BackendError.
    """
    first = read_prompt(session, tokens[:1]).logits(0)
    scores = [score_token(first, token, n_top) for token in tokens[1:2]]
    at = 1
    while at < len(tokens) - 1:
        check_cancelled()
        n = min(len(tokens) - 2 - at, session.draft_limit, _MAX_ROWS - 1)
        rows = session.forward(tokens[at], Draft.chain(tokens[at + 1 : at + 1 + n]))
        yield YIELD
        scores += [score_token(rows.logits(row), tokens[at + row + 1], n_top) for row in range(n + 1)]
        session.commit(range(n))
        at += n + 1
    return scores
