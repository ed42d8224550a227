"""Texts as batches of about the same size, in an order that a seed decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from edgespec.core.arrays import Ints
from edgespec.errors import InvalidRequest
from edgespec.files import replace_file
from edgespec.train.teacher import Part, Teacher
from edgespec.train.texts import TrainingText

_SUFFIX, _ARRAYS = ".npz", ("tokens", "ids", "log_probs", "mask", "features")  # of the files of parts
BATCH_TOKENS = 1024
_LEAST_READ = 10_000  # tokens
_STEP = 32  # tokens: the lengths of batches are multiples of it


def has_parts(folder: Path) -> bool:
    """Whether a target has read texts into `folder`."""
    return any(folder.glob(f"*{_SUFFIX}"))


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


class Parts:
    """What a network is trained on: batches of windows of texts, of similar length, other ones in each epoch.

    What the target says of a window is read once if it fits `max_bytes`, else whenever it is drawn. It is kept in
    files, so that a run that goes on does not read it again.
    """

    def __init__(
        self,
        texts: Sequence[TrainingText],
        teacher: Teacher,
        folder: Path,
        *,
        batch_tokens: int = BATCH_TOKENS,
        max_length: int = 512,
        max_bytes: int = 8 * 2**30,
        seed: int = 0,
    ) -> None:
        """A batch has at most `batch_tokens`, but at least one window. `folder` holds the files.

        Raises ValueError if no row counts.
        """
        self.texts = texts
        windows = cut_windows(texts, min(max_length, teacher.context_size))
        if not windows:
            raise ValueError("the texts have no tokens of their own")
        self._teacher = teacher
        self._folder = folder
        self._left_bytes = max_bytes - sum(file.stat().st_size for file in folder.glob(f"*{_SUFFIX}"))
        self._seed = seed
        self._batch_tokens = batch_tokens
        self._arrange(windows)

    def _arrange(self, windows: list[Window]) -> None:
        self.windows = windows
        sizes = np.array([window.stop - window.start for window in windows])
        self._lengths = -(-sizes // _STEP) * _STEP
        self._groups = _group(np.sort(self._lengths).tolist(), self._batch_tokens)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._groups)

    def fill(
        self, report: Callable[[int, int], None], limit_s: float = inf, clock: Callable[[], float] = monotonic
    ) -> None:
        """Read the first windows, as many as fit; `report` gets the numbers of tokens read and in all.

        After `limit_s` seconds of `clock`, and 10,000 tokens at least, the first window that is not in a file is left
        out, and so are all after it. Raises Cancelled, BackendError, InvalidRequest.
        """
        began_s = clock()
        ends = np.cumsum([window.stop - window.start for window in self.windows]).tolist()
        for index, end in enumerate(ends):
            is_late = clock() - began_s >= limit_s and index and ends[index - 1] >= _LEAST_READ
            if is_late and not self._find_file(index).exists():
                self._arrange(self.windows[:index])
                break
            self.read(index)
            report(end, ends[-1])
            if self._left_bytes <= 0:
                break

    @property
    def used_texts(self) -> list[TrainingText]:
        return [self.texts[i] for i in sorted({window.text for window in self.windows})]

    def read(self, index: int) -> Part:
        """The part of `windows[index]`. Raises Cancelled, BackendError, InvalidRequest."""
        file = self._find_file(index)
        if (part := _load_part(file)) is None:
            part = self._teacher.read(*self._cut_text(index))
            if self._left_bytes > 0:
                self._keep(part, file)
        return part

    def _cut_text(self, index: int) -> tuple[Ints, int]:
        """The tokens of a window, and the first row that counts."""
        window = self.windows[index]
        return self.texts[window.text].tokens[window.start : window.stop], window.first - window.start

    def _find_file(self, index: int) -> Path:
        tokens, first = self._cut_text(index)
        key = blake2b(f"{self._teacher.reads} {first} ".encode() + tokens.tobytes(), digest_size=16).hexdigest()
        return self._folder / f"{key}{_SUFFIX}"

    def _keep(self, part: Part, file: Path) -> None:
        """Write a file, the last one if the disk is full. Raises InvalidRequest if the folder was removed."""
        try:
            self._left_bytes -= _save_part(part, file)
        except OSError as error:
            if not self._folder.is_dir():
                raise removed_while_running() from error
            self._left_bytes = 0

    def take(self, step: int) -> list[Part]:
        """The batch of a step, whatever was taken before. Raises Cancelled, BackendError, InvalidRequest."""
        epoch, i = divmod(step, len(self._groups))
        rng = np.random.default_rng([self._seed, epoch])
        order = np.lexsort((rng.random(len(self.windows)), self._lengths))
        start, stop = self._groups[rng.permutation(len(self._groups))[i]]
        return [self.read(index) for index in order[start:stop].tolist()]


def removed_while_running() -> InvalidRequest:
    """The error of a run whose folder another process has removed."""
    return InvalidRequest("the state of the training was removed while it ran.", hint="Start again: it begins anew.")


def _save_part(part: Part, file: Path) -> int:
    """Write a file for its owner alone; returns its size. Raises OSError."""
    arrays = {name: array for name in _ARRAYS if (array := getattr(part, name)) is not None}
    with replace_file(file, 0o600) as partial:
        with partial.open("wb") as opened:
            np.savez(opened, **arrays)
        return partial.stat().st_size


def _load_part(file: Path) -> Part | None:
    """The part in a file; None if there is none, or a damaged one."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return Part(**arrays)
    except (OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError, BadZipFile):
        return None


def _group(lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, int]]:
    """(start, stop) of the windows of each batch, for ascending lengths."""
    groups, start = [], 0
    for i, length in enumerate(lengths):
        if i > start and (i + 1 - start) * length > batch_tokens:
            groups.append((start, i))
            start = i
    return [*groups, (start, len(lengths))]


def fill_up(parts: Sequence[Part]) -> Part:
    """Several parts as one, filled with zeros up to a common length; their hidden states are left out."""
    length = -(-max(len(part.tokens) for part in parts) // _STEP) * _STEP

    def stack(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.stack([np.pad(each, [(0, length - len(each)), (0, 0)][: each.ndim]) for each in arrays])

    return Part(
        stack([part.tokens for part in parts]),
        stack([part.ids for part in parts]),
        stack([part.log_probs for part in parts]),
        stack([part.mask for part in parts]),
    )
