"""The target's distributions after each token of a text: what a draft is trained to predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from edgespec.adapt.texts import TrainingText
from edgespec.backends.head_session import TappedSession
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.core.sampling import Indices, Ints, Logits, highest, sum_blocks, top_k
from edgespec.core.verify import read_prompt
from edgespec.errors import InvalidRequest
from edgespec.files import replace_file

TOP = 64  # tokens of a row
_FORWARD_BYTES = 64 * 2**20  # scores of one forward
_LOWEST = -100.0  # log probability of a token that is impossible
_SUFFIX, _ARRAYS = ".npz", ("tokens", "ids", "log_probs", "mask", "features")  # of the files of parts


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

    def __init__(
        self,
        session: Session,
        check: CheckCancelled,
        vocab_size: int | None = None,
        layers: tuple[int, ...] | None = None,
    ) -> None:
        """`vocab_size`: the draft's; ids from there on are left to the other tokens of a row.

        `layers` of the target are those whose hidden states a network reads; the session then holds no tokens. Raises
        Unsupported where the target has no such states.
        """
        limits = session.capabilities
        self._session = session
        self._check = check
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
            self._check()
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


# Texts as batches of about the same size, in an order that a seed decides.


BATCH_TOKENS = 1024
_LEAST_READ = 10_000  # tokens
_STEP = 32  # tokens: the lengths of batches are multiples of it


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

    What the target says of a window is read once where it fits `max_bytes`, else whenever it is drawn. It is kept in
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
        """A batch has `batch_tokens` at most, but one window at least. `folder` is that of the files.

        Raises ValueError where no row counts.
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

    def fill(self, report: Callable[[int, int], None], limit_s: float = inf) -> None:
        """Read the first windows, as many as fit; `report` gets the numbers of tokens read and in all.

        After `limit_s` seconds, and 10,000 tokens at least, windows from the first one on that is not kept are left
        out. Raises Cancelled, BackendError, InvalidRequest.
        """
        began_s = monotonic()
        ends = np.cumsum([window.stop - window.start for window in self.windows]).tolist()
        for index, end in enumerate(ends):
            is_late = monotonic() - began_s >= limit_s and index and ends[index - 1] >= _LEAST_READ
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
        """Write a file, the last one where the disk is full. Raises InvalidRequest where the folder was removed."""
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
    """The part in a file; None where there is none, or a damaged one."""
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
