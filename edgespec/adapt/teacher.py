"""The target's distributions after each token of a text: what a draft is trained to predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.adapt.texts import TrainingText
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.core.sampling import Indices, Ints, Logits, highest, sum_blocks, top_k
from edgespec.core.verify import read_prompt

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


# Texts as batches of about the same size, in an order that a seed decides.


B_co = TypeVar("B_co", covariant=True)

_STEP = 32  # tokens: the lengths of batches are multiples of it


class Batches(Protocol[B_co]):
    """What a network is trained on."""

    @property
    def key(self) -> str:
        """A hash of the data and of its order: equal keys mean equal batches."""

    def __len__(self) -> int:
        """Batches of an epoch."""

    def take(self, step: int) -> B_co:
        """The batch of a step, whatever was taken before. Raises Cancelled, BackendError."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Parts of texts, filled up to the longest, with the target's rows after each token.

    tokens     [B, T] int32
    ids        [B, T, K] int32; see TeacherRows
    log_probs  [B, T, K] float32
    mask       [B, T] float32, 1 for the rows that count: the text goes on after them with a token that is its own
    """

    tokens: Ints
    ids: Ints
    log_probs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens [start, stop) of a text, of which the rows from `first` on count; positions in the text."""

    text: int
    start: int
    first: int
    stop: int


def cut_windows(texts: Sequence[TrainingText], max_length: int) -> list[Window]:
    """Windows of at most `max_length` tokens in which each row that counts does so once.

    A window repeats the last quarter of the one before it, or of the lead, for context.
    """
    windows = []
    for i, text in enumerate(texts):
        first, end = max(text.n_lead - 1, 0), len(text.tokens) - 1  # nothing is known of what follows the last token
        start = 0 if end < max_length else max(first - max_length // 4, 0)
        while first < end:
            stop = min(start + max_length, end)
            windows.append(Window(i, start, first, stop))
            start, first = max(stop - max_length // 4, 0), stop
    return windows


class WindowBatches:
    """Draws windows of texts for each step: of similar length, other ones in each epoch."""

    def __init__(
        self,
        texts: Sequence[TrainingText],
        batch_tokens: int,
        max_length: int,
        seed: int,
        multiple: int = 1,
        layers: tuple[int, ...] = (),
    ) -> None:
        """A batch has `batch_tokens` at most, but one window at least; lengths count as multiples of `multiple`.

        `layers` are those whose hidden states the network reads. Raises ValueError where no row counts.
        """
        self.texts = texts
        self.windows = cut_windows(texts, max_length)
        if not self.windows:
            raise ValueError("the texts have no tokens of their own")
        self._seed = seed
        sizes = np.array([window.stop - window.start for window in self.windows])
        self._lengths = -(-sizes // multiple) * multiple
        self._groups = _group(np.sort(self._lengths).tolist(), batch_tokens)
        digest = blake2b(repr((layers, batch_tokens, max_length, seed)).encode(), digest_size=16)
        for text in texts:
            digest.update(repr((len(text.tokens), text.n_lead)).encode() + text.tokens.astype(np.int32).tobytes())
        self.key = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._groups)

    def _draw(self, step: int) -> Indices:
        """The windows of a step, by their index."""
        epoch, i = divmod(step, len(self._groups))
        rng = np.random.default_rng([self._seed, epoch])
        order = np.lexsort((rng.random(len(self.windows)), self._lengths))
        start, stop = self._groups[rng.permutation(len(self._groups))[i]]
        return order[start:stop]


class TextBatches(WindowBatches):
    """Batches[Batch] of texts."""

    def __init__(
        self,
        texts: Sequence[TrainingText],
        rows: RowStore,
        *,
        batch_tokens: int = 1024,
        max_length: int = 512,
        seed: int = 0,
    ) -> None:
        """`rows` are those of `texts`. Raises ValueError where no row counts."""
        super().__init__(texts, batch_tokens, max_length, seed, multiple=_STEP)
        self._rows = rows

    def take(self, step: int) -> Batch:
        drawn = self._draw(step)
        windows = [self.windows[i] for i in drawn]
        found = [self._rows.read(window.text) for window in windows]
        shape = len(windows), int(self._lengths[drawn].max())
        n_top = found[0].ids.shape[1]
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        ids = np.tile(np.arange(n_top, dtype=np.int32), (*shape, 1))
        log_probs = np.full((*shape, n_top), -np.log(n_top), np.float32)
        for i, (window, rows) in enumerate(zip(windows, found, strict=True)):
            part, n = slice(window.start, window.stop), window.stop - window.start
            tokens[i, :n] = self.texts[window.text].tokens[part]
            ids[i, :n], log_probs[i, :n] = rows.ids[part], rows.log_probs[part]
            mask[i, window.first - window.start : n] = 1
        return Batch(tokens, ids, log_probs, mask)


def _group(lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, int]]:
    """(start, stop) of the windows of each batch, for ascending lengths."""
    groups, start = [], 0
    for i, length in enumerate(lengths):
        if i > start and (i + 1 - start) * length > batch_tokens:
            groups.append((start, i))
            start = i
    return [*groups, (start, len(lengths))]
