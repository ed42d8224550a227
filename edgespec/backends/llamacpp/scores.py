"""The scores of rows that are staged for the next decode of a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.backends.llamacpp.hidden_states import Floats, HiddenStates
from edgespec.cancel import current_check
from edgespec.core.arrays import Ints, Logits
from edgespec.core.sampling import SamplingParams
from edgespec.core.truncate import non_finite_error
from edgespec.errors import Cancelled


@dataclass(slots=True)
class PendingBatch:
    """What one decode computes.

    decode   has it computed
    scores   by sequence id
    outputs  [n_outputs or more, V] after the decode, until the next one of the context
    seconds  that the decode took; None before it
    error    why there are no outputs
    """

    decode: Callable[[], None]
    scores: dict[int, LlamaScores] = field(default_factory=dict)
    n_tokens: int = 0
    n_outputs: int = 0
    outputs: Logits | None = None
    seconds: float | None = None
    error: Exception | None = None


@dataclass(slots=True)
class SequenceSlot:
    """A session's place in a context.

    sequence  its id in llama.cpp
    scores    of its last forward, until they are committed or dropped
    is_dirty  rows of it were staged that are not yet part of its text
    tap       copies hidden states of its rows, for a trained head
    """

    sequence: int
    scores: LlamaScores | None = None
    is_dirty: bool = False
    tap: HiddenStates | None = None


class LlamaScores:
    """Logits [rows, V] of a decode, read from llama.cpp's own buffer. The first read has the batch decoded."""

    def __init__(
        self,
        slot: SequenceSlot,
        batch: PendingBatch,
        fill: Callable[[], None],
        n_tokens: int,
        n_outputs: int,
        *,
        is_prefill: bool,
        is_after_flush: bool,
    ) -> None:
        """Add `n_tokens` tokens of `slot`, the last `n_outputs` of which have scores, to `batch`.

        `fill` writes them to the native batch. `is_after_flush`: the context had to decode a full batch before it could
        take them. If the slot has a tap, `states` are [n_tokens, width] once they are decoded.
        """
        self.slot = slot
        self.n_tokens, self.n_outputs = n_tokens, n_outputs
        self.is_prefill = is_prefill
        self.waited_s = self.peer_wait_s = 0.0
        self.states: Floats | None = None
        self._check = current_check()  # another session's read may have the batch decoded
        self._batch, self._fill = batch, fill
        self._rows: Logits | None = None
        self._is_after_flush = is_after_flush
        batch.scores[slot.sequence] = slot.scores = self
        batch.n_tokens += n_tokens
        batch.n_outputs += n_outputs
        slot.is_dirty = True

    @property
    def is_cancelled(self) -> bool:
        """Whether the work that reads these scores is cancelled."""
        try:
            self._check()
        except Cancelled:
            return True
        return False

    @property
    def peer_rows(self) -> int | None:
        has_prefill = any(scores.is_prefill for scores in self._batch.scores.values())
        return None if has_prefill or self._is_after_flush else self._batch.n_tokens - self.n_tokens

    def argmax(self) -> Ints:
        rows = self.read()
        best: Ints = rows.argmax(axis=1).astype(np.int32)
        if not np.isfinite(rows[np.arange(len(best)), best]).all():
            raise non_finite_error()
        return best

    def logits(self, row: int) -> Logits:
        z: Logits = self.read()[row]
        return z

    def host_logits(self, row: int) -> Logits | None:
        return None if self._rows is None else self._rows[row]

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        return None  # the logits are in host memory already

    def read(self) -> Logits:
        """[rows, V]. Raises Cancelled, BackendError."""
        if self._rows is None:
            batch = self._batch
            if batch.seconds is None:
                batch.decode()
                self.waited_s = batch.seconds or 0.0
            else:
                self.peer_wait_s = batch.seconds
            if batch.error is not None:
                raise batch.error
            assert batch.outputs is not None
            first = self._place[1]
            self._rows = batch.outputs[first : first + self.n_outputs]
        return self._rows

    def place(self, token: int, output: int) -> tuple[int, int]:
        """Write the rows to the native batch, behind `token` rows of which `output` have scores.

        Returns both counts with these rows included.
        """
        self._place = token, output
        self._fill()
        return token + self.n_tokens, output + self.n_outputs

    def copy_states(self) -> None:
        """Called after the decode, if the slot has a tap."""
        if self.slot.tap is not None:
            self.states = self.slot.tap.read(self._place[0], self.n_tokens)

    def copy_rows(self) -> None:
        """Keep the rows if they may still be read: the next decode overwrites the buffer that they are in."""
        if self.slot.scores is self and self._batch.error is None:
            self._rows = self.read().copy()
