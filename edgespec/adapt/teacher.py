"""The target's distributions after each token of a text: what a draft is trained to predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.core.arrays import Ints, Logits
from edgespec.core.greedy import read_prompt
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.core.rng import sum_blocks
from edgespec.core.truncation import highest, top_k

TOP = 64  # tokens of a row
_FORWARD_BYTES = 64 * 2**20  # scores of one forward
_ID_BYTES, _LOG_PROB_BYTES = 4, 2
_LOWEST = -100.0  # log probability of a token that is impossible


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """The target's most probable tokens after each of n tokens, the best one first.

    ids        [n, K]
    log_probs  [n, K] natural logarithms
    """

    ids: Ints
    log_probs: npt.NDArray[np.floating]

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.log_probs.nbytes


class Teacher:
    """A target that reads texts. The session is its own; the caller closes it."""

    def __init__(self, session: Session, check: CheckCancelled, vocab_size: int | None = None) -> None:
        """`vocab_size`: the draft's; ids from there on are left to the other tokens of a row."""
        limits = session.capabilities
        self._session = session
        self._check = check
        self._vocab_size = min(vocab_size or limits.vocab_size, limits.vocab_size)
        self.n_top = min(TOP, self._vocab_size)

    def read(self, tokens: Sequence[int] | Ints) -> TeacherRows:
        """The rows of a text of any length; where it exceeds the context, each has half of it before it at least.

        Raises Cancelled, BackendError.
        """
        text = [int(token) for token in tokens]
        ids = np.zeros((len(text), self.n_top), np.int32)
        log_probs = np.zeros((len(text), self.n_top), np.float32)
        size = self._session.capabilities.context_size
        start = done = 0
        while done < len(text):
            stop = min(start + size, len(text))
            self._read_window(text[start:stop], done - start, ids[done:stop], log_probs[done:stop])
            start, done = stop - size // 2, stop
        return TeacherRows(ids, log_probs)

    def _read_window(self, text: list[int], first: int, ids: Ints, log_probs: Logits) -> None:
        """Fill the rows after the tokens from `first` on."""
        session, at = self._session, first
        if first == 0:
            self._fill(read_prompt(session, text[:1]).logits(0), ids[0], log_probs[0])
            at = 1
        else:
            read_prompt(session, text[:first])
        max_rows = max(1, _FORWARD_BYTES // (4 * session.capabilities.vocab_size))
        while at < len(text):
            self._check()
            n = min(len(text) - at, session.draft_limit + 1, max_rows)
            scores = session.forward(text[at], Draft.chain(text[at + 1 : at + n]))
            for row in range(n):
                self._fill(scores.logits(row), ids[at - first + row], log_probs[at - first + row])
            session.commit(range(n - 1))
            at += n

    def _fill(self, logits: Logits, ids: Ints, log_probs: Logits) -> None:
        """Write one row. Probabilities are those of the whole vocabulary."""
        best = highest(logits)
        norm = float(best) + float(np.log(sum_blocks(np.exp(logits - best)).sum()))
        own = logits[: self._vocab_size]
        found = top_k(own, self.n_top)
        if len(found) < self.n_top:  # the others are impossible
            found = np.concatenate([found, np.setdiff1d(np.arange(len(own)), found)[: self.n_top - len(found)]])
        ids[:] = found[np.argsort(-own[found], kind="stable")]
        log_probs[:] = np.maximum(own[ids] - norm, _LOWEST)


class RowStore:
    """The rows of all texts of a run. Those that do not fit `max_bytes` are computed again whenever they are read."""

    def __init__(self, teacher: Teacher, texts: Sequence[Sequence[int] | Ints], max_bytes: int = 512 * 2**20) -> None:
        self._teacher = teacher
        self._texts = texts
        self._left_bytes = max_bytes
        self._kept: dict[int, TeacherRows] = {}

    def fill(self, report: Callable[[int, int], None]) -> None:
        """Read the first texts, as many as fit; `report` gets the numbers of tokens read and to be read.

        Raises Cancelled, BackendError.
        """
        row_bytes = self._teacher.n_top * (_ID_BYTES + _LOG_PROB_BYTES)
        lengths = [len(text) for text in self._texts]
        n_kept = int(np.searchsorted(np.cumsum(lengths) * row_bytes, self._left_bytes, side="right"))
        for i in range(n_kept):
            self.read(i)
            report(sum(lengths[: i + 1]), sum(lengths[:n_kept]))

    def read(self, index: int) -> TeacherRows:
        """The rows of a text. Log probabilities have half precision. Raises Cancelled, BackendError."""
        if (rows := self._kept.get(index)) is not None:
            return rows
        found = self._teacher.read(self._texts[index])
        rows = TeacherRows(found.ids, found.log_probs.astype(np.float16))
        if rows.nbytes <= self._left_bytes:
            self._left_bytes -= rows.nbytes
            self._kept[index] = rows
        return rows
