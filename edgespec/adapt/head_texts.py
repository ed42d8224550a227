"""Texts as heads read them: with the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgespec.adapt.batches import Window, cut_windows, hash_texts
from edgespec.adapt.teacher import Teacher, TeacherRows
from edgespec.adapt.texts import TrainingText
from edgespec.backends.mlx.session import MlxSession
from edgespec.core.arrays import Ints
from edgespec.core.protocols import CheckCancelled


@dataclass(frozen=True, slots=True)
class HeadText:
    """n tokens, which are a part of a text.

    tokens    [n] int32
    features  [n, width] the target's hidden states, an array of MLX
    rows      the target's most probable tokens after each token
    mask      [n] float32, 1 for rows that count
    """

    tokens: Ints
    features: Any
    rows: TeacherRows
    mask: npt.NDArray[np.float32]


class HeadTexts:
    """Batches[Sequence[HeadText]] of parts of texts, in another order in each epoch.

    Hidden states come from a prefill. Those that do not fit `max_bytes` are computed again whenever they are read.
    """

    def __init__(
        self,
        texts: Sequence[TrainingText],
        target: MlxSession,
        layers: tuple[int, ...],
        check: CheckCancelled,
        *,
        batch_tokens: int = 1024,
        max_length: int = 512,
        max_bytes: int = 512 * 2**20,
        seed: int = 0,
    ) -> None:
        """`target` holds no tokens; it is tapped for the states of `layers`, and used by nobody else.

        A batch has `batch_tokens` at most, but one part at least. Raises ValueError where no row counts, Unsupported
        where the target has no such states.
        """
        self.texts = texts
        self.windows = cut_windows(texts, min(max_length, target.capabilities.context_size))
        if not self.windows:
            raise ValueError("the texts have no tokens of their own")
        self._session = target
        self._features = target.tap(layers)
        self._teacher = Teacher(target, check)
        self._groups = _group(self.windows, batch_tokens)
        self._left_bytes = max_bytes
        self._kept: dict[int, HeadText] = {}
        self._seed = seed
        self.key = hash_texts(texts, layers, batch_tokens, max_length, seed)

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, step: int) -> list[HeadText]:
        epoch, i = divmod(step, len(self._groups))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups))
        return [self.read(index) for index in self._groups[order[i]]]

    def read(self, index: int) -> HeadText:
        """The part of `windows[index]`. Raises Cancelled, BackendError."""
        if (kept := self._kept.get(index)) is not None:
            return kept
        window = self.windows[index]
        tokens = self.texts[window.text].tokens[window.start : window.stop]
        self._session.rewind(0)
        rows = self._teacher.read(tokens)
        features = mx.contiguous(self._features.take(0, len(tokens)))
        mx.eval(features)
        mask = (np.arange(len(tokens)) >= window.first - window.start).astype(np.float32)
        text = HeadText(tokens, features, rows, mask)
        size = features.nbytes + rows.nbytes
        if size <= self._left_bytes:
            self._left_bytes -= size
            self._kept[index] = text
        return text


def _group(windows: Sequence[Window], batch_tokens: int) -> list[list[int]]:
    """The windows of each batch, in order."""
    groups: list[list[int]] = []
    left = 0
    for i, window in enumerate(windows):
        length = window.stop - window.start
        if not groups or length > left:
            groups.append([])
            left = batch_tokens
        groups[-1].append(i)
        left -= length
    return groups
