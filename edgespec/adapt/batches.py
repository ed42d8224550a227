"""Texts as batches of about the same size, in an order that a seed decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.adapt.teacher import RowStore
from edgespec.adapt.texts import TrainingText
from edgespec.core.arrays import Indices, Ints

B_co = TypeVar("B_co", covariant=True)

_STEP = 32  # tokens: lengths are multiples of it


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

    @property
    def padded(self) -> int:
        """The length that it takes in a batch."""
        return -(-(self.stop - self.start) // _STEP) * _STEP


def hash_texts(texts: Sequence[TrainingText], *options: object) -> str:
    """A hash of texts, and of what else decides about their batches."""
    digest = blake2b(repr(options).encode(), digest_size=16)
    for text in texts:
        digest.update(repr((len(text.tokens), text.n_lead)).encode() + text.tokens.astype(np.int32).tobytes())
    return digest.hexdigest()


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


class TextBatches:
    """Batches[Batch] of texts. Each has parts of similar length, other ones in each epoch."""

    def __init__(
        self,
        texts: Sequence[TrainingText],
        rows: RowStore,
        *,
        batch_tokens: int = 1024,
        max_length: int = 512,
        seed: int = 0,
    ) -> None:
        """`rows` are those of `texts`. A batch has `batch_tokens` at most, but one part at least.

        Raises ValueError where no row counts.
        """
        self._texts = texts
        self._rows = rows
        self._seed = seed
        self._windows = cut_windows(texts, max_length)
        if not self._windows:
            raise ValueError("the texts have no tokens of their own")
        self._lengths = np.array([window.padded for window in self._windows])
        self._groups = _group(np.sort(self._lengths).tolist(), batch_tokens)
        self._epoch: tuple[int, list[Indices]] = (-1, [])
        self.key = hash_texts(texts, batch_tokens, max_length, seed)

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, step: int) -> Batch:
        epoch, i = divmod(step, len(self._groups))
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffle(epoch)
        return self._build([self._windows[j] for j in self._epoch[1][i]])

    def _shuffle(self, epoch: int) -> list[Indices]:
        """The windows of each batch of an epoch."""
        rng = np.random.default_rng([self._seed, epoch])
        order = np.lexsort((rng.random(len(self._windows)), self._lengths))
        groups = [order[start:stop] for start, stop in self._groups]
        return [groups[i] for i in rng.permutation(len(groups))]

    def _build(self, windows: Sequence[Window]) -> Batch:
        found = [self._rows.read(window.text) for window in windows]
        shape = len(windows), max(window.padded for window in windows)
        n_top = found[0].ids.shape[1]
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        ids = np.tile(np.arange(n_top, dtype=np.int32), (*shape, 1))
        log_probs = np.full((*shape, n_top), -np.log(n_top), np.float32)
        for i, (window, rows) in enumerate(zip(windows, found, strict=True)):
            part, n = slice(window.start, window.stop), window.stop - window.start
            tokens[i, :n] = self._texts[window.text].tokens[part]
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
