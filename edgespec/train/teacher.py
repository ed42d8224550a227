"""The target's distributions after each token of a text: what a draft is trained to predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from edgespec.backends.head_session import TappedSession
from edgespec.cancel import check_cancelled
from edgespec.core.arrays import Indices, Ints, Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import Draft, Session
from edgespec.core.truncate import highest, top_k
from edgespec.core.weights import sum_blocks

TOP = 64  # tokens of a row
_FORWARD_BYTES = 64 * 2**20  # scores of one forward
_LOWEST = -100.0  # log probability of a token that is impossible


@dataclass(frozen=True, slots=True)
class Part:
    """n tokens of a text, and the target's most probable tokens after each of them, the best one first.

    Several parts are filled up to a common length, and then have a first axis more.

    tokens     [n] int32
    ids        [n, K] int32
    log_probs  [n, K] natural logarithms
    mask       [n] float32, 1 for the rows that count: the text goes on after them with a token that is its own
    features   [n, width] float16, the target's hidden states; None for networks that read none
    """

    tokens: Ints
    ids: Ints
    log_probs: npt.NDArray[np.floating]
    mask: npt.NDArray[np.float32]
    features: npt.NDArray[np.float16] | None = None


class Teacher:
    """A target that reads texts. The session is its own; the caller closes it."""

    def __init__(self, session: Session, vocab_size: int | None = None, layers: tuple[int, ...] | None = None) -> None:
        """`vocab_size` is the draft's. A Part lists no ids from there on: they count with the other tokens of a row.

        `layers` of the target are those whose hidden states a network reads; the session then holds no tokens. Raises
        Unsupported if the target has no such states.
        """
        limits = session.capabilities
        self._session = session
        self._kept = None if layers is None else cast(TappedSession, session).tap(layers)
        self._vocab_size = min(vocab_size or limits.vocab_size, limits.vocab_size)
        self.reads = f"{self._vocab_size} {layers}"  # beside the tokens all that decides what is read
        self.n_top = min(TOP, self._vocab_size)
        self.context_size = limits.context_size

    def read(self, tokens: Ints, first: int = 0) -> Part:
        """Read a text of at most `context_size` tokens, of which the rows from `first` on count.

        Log probabilities have half precision. Raises Cancelled, BackendError.
        """
        session, text = self._session, tokens.tolist()
        ids = np.zeros((len(text), self.n_top), np.int32)
        log_probs = np.zeros((len(text), self.n_top), np.float16)
        max_rows = max(1, _FORWARD_BYTES // (4 * session.capabilities.vocab_size))
        session.rewind(0)
        ids[0], log_probs[0] = self._choose_best(read_prompt(session, text[:1]).logits(0))
        at = 1
        while at < len(text):
            check_cancelled()
            n = min(len(text) - at, session.draft_limit + 1, max_rows)
            scores = session.forward(text[at], Draft.chain(text[at + 1 : at + n]))
            for row in range(n):
                ids[at + row], log_probs[at + row] = self._choose_best(scores.logits(row))
            session.commit(range(n - 1))
            at += n
        mask = (np.arange(len(text)) >= first).astype(np.float32)
        features = None if self._kept is None else _to_half(self._kept.take(0, len(text)))
        return Part(tokens, ids, log_probs, mask, features)

    def _choose_best(self, logits: Logits) -> tuple[Indices, Logits]:
        """The most probable tokens of a row; their probabilities are those of the whole vocabulary."""
        best = highest(logits)
        norm = float(best) + float(np.log(sum_blocks(np.exp(logits - best)).sum()))
        own = logits[: self._vocab_size]
        found = top_k(own, self.n_top)
        if len(found) < self.n_top:  # the others are impossible
            found = np.concatenate([found, np.setdiff1d(np.arange(len(own)), found)[: self.n_top - len(found)]])
        found = found[np.argsort(-own[found], kind="stable")]
        return found, np.maximum(own[found] - norm, _LOWEST)


def _to_half(rows: Any) -> npt.NDArray[np.float16]:
    """Rows of numpy, or of MLX, which has number types that numpy has not."""
    if not isinstance(rows, np.ndarray):
        import mlx.core as mx

        rows = np.array(rows.astype(mx.float32))
    limit = np.finfo(np.float16).max
    half: npt.NDArray[np.float16] = rows.clip(-limit, limit).astype(np.float16)
    return half
