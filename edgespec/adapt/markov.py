"""Learning which tokens follow which among the candidates of a block drafter (see drafters.recycling), in numpy.

The positions of a block do not know each other's tokens, so that deeper ones often repeat a token or leave one out. The
term is learned from the drafter's own rows over texts: it changes the scores of the most probable tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.adapt.evaluate import find_rounds
from edgespec.adapt.texts import TrainingText
from edgespec.core.drafter import BlockSession
from edgespec.core.protocols import CheckCancelled
from edgespec.core.sampling import Ints, top_k
from edgespec.drafters.recycling import CANDIDATES, Bigram

Floats = npt.NDArray[np.float32]
RANK = 32
MAX_ROWS = 200_000
_BATCH = 2048  # rows of a step
_RATE, _DECAY = 0.1, 0.03  # of Adagrad
_SPREAD = 0.04  # of the first values


@dataclass(frozen=True, slots=True)
class CandidateRows:
    """Rows of blocks whose most probable tokens have the text's among them; m candidates each.

    ids, scores  [n, m] the tokens and their logits
    previous     [n] the text's token before
    chosen       [n] the index of the text's token
    """

    ids: Ints
    scores: Floats
    previous: Ints
    chosen: Ints


def read_rows(
    session: BlockSession, texts: Sequence[TrainingText], depth: int, check: CheckCancelled, most: int = MAX_ROWS
) -> CandidateRows:
    """Rows of blocks of `depth` tokens over texts, without the first, which knows its token before.

    `session` reads the texts by itself, as a PARD model's does. Raises Cancelled, BackendError.
    """
    ids: list[Ints] = []
    scores: list[Floats] = []
    pairs: list[tuple[int, int]] = []  # (token before, index of the text's token)
    for text in texts:
        tokens, rounds = text.tokens.tolist(), find_rounds(text)
        session.begin(tokens[: rounds.start])
        for position in rounds:
            check()
            if len(pairs) >= most:
                break
            rows = session.block(tokens[:position], position, min(depth, len(tokens) - position)) or ()
            for d, row in enumerate(rows[1:], 1):
                best = top_k(row, CANDIDATES)
                if len(best) == CANDIDATES and tokens[position + d] in best:
                    ids.append(best.astype(np.int32))
                    scores.append(row[best])
                    pairs.append((tokens[position + d - 1], int(np.searchsorted(best, tokens[position + d]))))
    shape = len(pairs), CANDIDATES
    previous, chosen = np.array(pairs, np.int32).reshape(-1, 2).T
    return CandidateRows(np.array(ids, np.int32).reshape(shape), np.array(scores).reshape(shape), previous, chosen)


def train_bigram(
    rows: CandidateRows, vocab_size: int, check: CheckCancelled, rank: int = RANK, seed: int = 0
) -> Bigram:
    """The term that makes the text's tokens most probable among the candidates: one pass by Adagrad over the rows.

    Tokens that no row has keep a term of about 0. Raises Cancelled.
    """
    rng = np.random.default_rng(seed)
    first, second = (rng.standard_normal((vocab_size, rank)).astype(np.float32) * _SPREAD for _ in range(2))
    squares = np.full(vocab_size, 1e-6, np.float32), np.full(vocab_size, 1e-6, np.float32)
    order = rng.permutation(len(rows.previous))
    for start in range(0, len(order), _BATCH):
        check()
        part = order[start : start + _BATCH]
        previous, ids = rows.previous[part], rows.ids[part]
        a, b = first[previous], second[ids]
        scores = rows.scores[part] + np.einsum("nr,nmr->nm", a, b)
        wrong = np.exp(scores - scores.max(axis=1, keepdims=True))
        wrong /= wrong.sum(axis=1, keepdims=True)
        wrong[np.arange(len(part)), rows.chosen[part]] -= 1
        _step(first, squares[0], previous, np.einsum("nm,nmr->nr", wrong, b) + _DECAY * a)
        _step(second, squares[1], ids.reshape(-1), (wrong[..., None] * a[:, None]).reshape(-1, rank), decay=_DECAY)
    seen = [np.bincount(each.reshape(-1), minlength=vocab_size) > 0 for each in (rows.previous, rows.ids)]
    return Bigram(first * seen[0][:, None], second * seen[1][:, None])


def _step(matrix: Floats, squares: Floats, tokens: Ints, gradients: Floats, decay: float = 0.0) -> None:
    """Move the rows of `tokens` [n] down their `gradients` [n, rank], which are summed by token."""
    order = np.argsort(tokens, kind="stable")
    own, start = np.unique(tokens[order], return_index=True)
    total = np.add.reduceat(gradients[order], start, axis=0) + decay * matrix[own]
    squares[own] += (total**2).mean(axis=1)
    matrix[own] -= _RATE * total / np.sqrt(squares[own])[:, None]
