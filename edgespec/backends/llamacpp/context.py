"""A native context: sessions stage the rows that they want decoded; the first that reads has all of them decoded."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.batch import NativeBatch
from edgespec.backends.llamacpp.library import Library
from edgespec.core.arrays import Ints, Logits
from edgespec.core.batching import SOLO, BatchPeers
from edgespec.core.protocols import CheckCancelled
from edgespec.core.sampling import SamplingParams, not_numbers
from edgespec.errors import BackendError, Cancelled

PREFILL_CHUNK = 512
MAX_ROWS = 64  # a root and 63 draft nodes; sizes the logits buffers and the number of sequences
_ROWS_A_SLOT = 8  # where that is more
_CHUNK_IN_COMPANY = 64  # of those who decode, whose tokens wait for it
_MOST_SEQUENCES = 256  # of any llama.cpp context
_SOON_S = 0.1  # a decode that is expected to take no longer is waited for

_ABORTED, _NO_ROOM = 2, 1


class LlamaScores:
    """Logits [rows, V] of a decode, read from llama.cpp's own buffer; the first read has it done."""

    def __init__(
        self,
        context: Context,
        member: SequenceSlot,
        shared: PendingBatch,
        n_tokens: int,
        rows: int,
        *,
        reads: bool,
        has_flushed: bool,
    ) -> None:
        """The next `rows` outputs of the round, for `n_tokens` that are staged there; `reads`: of a prompt."""
        self._context = context
        self._round = shared
        self._span = slice(shared.n_outputs, shared.n_outputs + rows)
        self._rows: Logits | None = None
        self._has_flushed = has_flushed  # those who were before it in the round
        self.member = member
        self.n_tokens = n_tokens
        self.reads = reads
        self.waited_s = self.peer_wait_s = 0.0

    @property
    def peer_rows(self) -> int | None:
        is_odd = self._has_flushed or any(scores.reads for scores in self._round.scores.values())
        return None if is_odd else self._round.n_tokens - self.n_tokens

    def argmax(self) -> Ints:
        rows = self.read()
        best: Ints = rows.argmax(axis=1).astype(np.int32)
        if not np.isfinite(rows[np.arange(len(best)), best]).all():
            raise not_numbers()
        return best

    def logits(self, row: int) -> Logits:
        z: Logits = self.read()[row]
        return z

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        return None  # the logits are in host memory already

    def hidden(self) -> object:
        return None

    def read(self) -> Logits:
        """Raises Cancelled, BackendError."""
        if self._rows is None:
            if self._round.seconds is None:
                self._context.run()
                self.waited_s = self._round.seconds or 0.0
            else:
                self.peer_wait_s = self._round.seconds
            if self._round.error is not None:
                raise self._round.error
            self._rows = self._context.outputs[self._span]
        return self._rows

    def keep(self) -> None:
        """The buffer is about to be used again."""
        if self.member.current is self and self._round.error is None:
            self._rows = self.read().copy()


@dataclass(slots=True)
class SequenceSlot:
    """A session in a context: its sequence, who may cancel it, and the scores it has yet to make use of."""

    sequence: int
    check: CheckCancelled
    current: LlamaScores | None = None
    is_unsettled: bool = False  # rows have been staged that are not yet part of its text, or will never be

    @property
    def is_cancelled(self) -> bool:
        try:
            self.check()
        except Cancelled:
            return True
        return False


@dataclass(slots=True)
class PendingBatch:
    """What is decoded together; `seconds` once it has been."""

    scores: dict[int, LlamaScores] = field(default_factory=dict)  # by sequence
    n_tokens: int = 0
    n_outputs: int = 0
    seconds: float | None = None
    error: Exception | None = None


class Context:
    """One llama_context over `slots` sessions at most, each with a sequence of its own over the same cells."""

    def __init__(self, lib: Library, model: Any, params: Any, vocab_size: int, slots: int, *, branches: bool) -> None:
        """`params` have sizes and types of the cache; `branches`: whether there may be trees. Raises BackendError."""
        api = lib.api
        rows = max(MAX_ROWS, _ROWS_A_SLOT * slots)
        n_sequences = min(rows, _MOST_SEQUENCES) if branches else slots  # llama.cpp wants no more of them than of rows
        params.n_batch = params.n_ubatch = PREFILL_CHUNK
        params.n_outputs_max = rows
        params.n_seq_max = n_sequences
        params.kv_unified = True
        self._asked = api.ggml_abort_callback(self._aborts)  # llama.cpp keeps only a pointer
        self._unasked = api.ggml_abort_callback()
        lib.log.clear_errors()
        self.native = api.llama_init_from_model(model, params)
        if not self.native:
            raise BackendError(
                f"llama.cpp could not set up a context of {params.n_ctx} tokens: {lib.log.reason()}.",
                hint="Use a smaller --ctx, fewer --parallel answers, or fewer --gpu-layers.",
            )
        self.is_shared = slots > 1
        self._lib = lib
        self._decode = api.llama_decode
        self._batch = NativeBatch(api, PREFILL_CHUNK, n_sequences)
        self._most_rows = rows
        self._vocab_size = vocab_size
        self._slots = list(range(slots))
        self._spare = list(range(slots, n_sequences))
        self._has_branches = branches
        self._members = 0
        self._round, self._last = PendingBatch(), PendingBatch()
        self._is_asked = False  # whether the next decode may be given up in between
        self._row_s = math.inf  # of the last decode that was not given up
        self.is_broken = False  # a decode has failed for no reason that can be mended
        self.outputs: Logits = np.empty((0, vocab_size), np.float32)
        self._address = 0

    @property
    def most_nodes(self) -> int:
        """Of one more tree, each of which may be the end of a branch; one sequence is left for copies."""
        return min(MAX_ROWS - 1, len(self._spare)) if self._has_branches else MAX_ROWS - 1

    def enter(self, check: CheckCancelled) -> SequenceSlot:
        """A slot for one more session. Raises BackendError."""
        if not self.native or not self._slots:
            raise BackendError("the model keeps no more texts at once.", hint="Use a larger --parallel.")
        self._members += 1
        return SequenceSlot(self._slots.pop(0), check)

    def leave(self, member: SequenceSlot) -> None:
        """Its sequence is empty; the context goes with the last session."""
        self._members -= 1
        self._slots.append(member.sequence)
        self._last.scores.pop(member.sequence, None)
        if not self._members:
            self._lib.api.llama_free(self.native)
            self.native = None

    def borrow(self, n: int) -> list[int]:
        """[n] sequences that nobody uses."""
        borrowed, self._spare = self._spare[:n], self._spare[n:]
        return borrowed

    def give_back(self, sequences: Sequence[int]) -> None:
        self._spare += sequences

    def peers(self, member: SequenceSlot) -> BatchPeers:
        """Who else has rows in this round, or had in the last one."""
        if not self.is_shared:
            return SOLO
        others = self._others(member)
        decoding = [scores.n_tokens for scores in others if not scores.reads]
        return BatchPeers(len(decoding), sum(decoding), len(decoding) < len(others))

    def chunk(self, member: SequenceSlot) -> int:
        """Tokens of a prompt to read at once: few beside those who decode, else one's part of what a decode takes."""
        if not self.is_shared:
            return PREFILL_CHUNK
        others = self._others(member)
        readers = sum(scores.reads for scores in others)
        return _CHUNK_IN_COMPANY if readers < len(others) else PREFILL_CHUNK // (1 + readers)

    def chain(
        self, member: SequenceSlot, tokens: Sequence[int], position: int, *, outputs: int, reads: bool
    ) -> LlamaScores:
        """Stage `tokens` one after another from `position` of the session's text; the last `outputs` have scores."""
        scores = self._staged(member, len(tokens), outputs, reads=reads)
        self._batch.chain(tokens, position, member.sequence, outputs=outputs)
        return scores

    def tree(
        self, member: SequenceSlot, tokens: Sequence[int], positions: Sequence[int], members: Sequence[Sequence[int]]
    ) -> LlamaScores:
        """Stage one row a token at its own position, in all the sequences of `members`; every row has scores."""
        scores = self._staged(member, len(tokens), len(tokens), reads=False)
        self._batch.tree(tokens, positions, members)
        return scores

    def settle(self, member: SequenceSlot) -> None:
        """Leave nothing of it undone."""
        if member.sequence in self._round.scores:
            self.run()

    def run(self) -> None:
        """Decode what is staged; how that went is for those to say who staged it."""
        for scores in self._last.scores.values():
            scores.keep()
        self._last = self._round
        self._lib.log.clear_errors()
        self._ask(self._last.n_tokens * self._row_s > _SOON_S)
        started = perf_counter()
        is_wanted = self._is_asked or not self._aborts(None)
        code = self._decode(self.native, self._batch.native) if is_wanted else _ABORTED
        self._batch.clear()
        self._round = PendingBatch()
        self._last.error = self._failure(code) if code else self._found_outputs()
        self._last.seconds = perf_counter() - started  # an accelerator has done its work when there are outputs
        if not code:
            self._row_s = self._last.seconds / self._last.n_tokens

    def _ask(self, is_asked: bool) -> None:
        """Whether llama.cpp asks if it is to go on, which it does for each node of its graph: a sixth of the time of a
        model of 6M parameters, though nobody minds a tenth of a second. Where it does not, we ask once.
        """
        if is_asked != self._is_asked:
            self._is_asked = is_asked
            self._lib.api.llama_set_abort_callback(self.native, self._asked if is_asked else self._unasked, None)

    def _others(self, member: SequenceSlot) -> list[LlamaScores]:
        """What the others have asked for in this round, or else in the last one."""
        latest = {**self._last.scores, **self._round.scores}
        return [scores for sequence, scores in latest.items() if sequence != member.sequence]

    def _staged(self, member: SequenceSlot, n: int, outputs: int, *, reads: bool) -> LlamaScores:
        is_full = self._round.n_tokens + n > PREFILL_CHUNK or self._round.n_outputs + outputs > self._most_rows
        if is_full:
            self.run()
        into = self._round
        scores = LlamaScores(self, member, into, n, outputs, reads=reads, has_flushed=is_full)
        member.is_unsettled = True
        into.scores[member.sequence] = member.current = scores
        into.n_tokens += n
        into.n_outputs += outputs
        return scores

    def _failure(self, code: int) -> Exception:
        if code == _ABORTED:
            return Cancelled()
        if code == _NO_ROOM:
            return BackendError(
                "llama.cpp found no room in its cache.", hint="Set a larger --ctx, or start a new chat."
            )
        self.is_broken = True
        return self._lib.failed(code)

    def _found_outputs(self) -> Exception | None:
        pointer = self._lib.api.llama_get_logits(self.native)
        if not pointer:
            return BackendError("llama.cpp returned no logits.", hint="Report this as a bug, with --verbose output.")
        address = ctypes.addressof(pointer.contents)
        if address != self._address:  # making a view costs 20 us; only the rows of the last forward are ever read
            self._address = address
            self.outputs = np.ctypeslib.as_array(pointer, (self._most_rows, self._vocab_size))
        return None

    def _aborts(self, _data: object) -> bool:
        """A decode is given up when nobody wants any of it."""
        return all(scores.member.is_cancelled for scores in self._last.scores.values())
