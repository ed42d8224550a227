"""A llama_context that several sessions share: each stages rows, and the first read of scores has all decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.native_context import MAX_TOKENS, NativeContext
from edgespec.backends.llamacpp.scores import LlamaScores, PendingBatch, SequenceSlot
from edgespec.backends.llamacpp.streams import Streams
from edgespec.core.peers import SOLO, BatchPeers
from edgespec.errors import BackendError, Cancelled

MAX_ROWS = 64  # of one session's forward: a root and 63 draft nodes
_ROWS_PER_SLOT = 8  # output rows of a shared context for each slot, if these are more than MAX_ROWS in all
_MAX_SEQUENCES = 256  # of any llama.cpp context
_PREFILL_CHUNK_WITH_PEERS = 64  # tokens, while other sessions decode and wait for the same forward


class Context:
    """A native context with room for `slots` sessions, each of which is a sequence.

    Either all sequences are over the same cells, and a row's attention passes over those of the others too. Or there
    are streams: each sequence has cells of its own, and drafts are chains. llama.cpp then splits a batch into forwards
    of equally many rows of sequences with consecutive ids. The first `slots` sequences are those of sessions, the rest
    are spare, for the branches of draft trees.

    max_outputs  rows with scores that one decode may have
    """

    def __init__(
        self, lib: Library, model: Any, params: Any, vocab_size: int, slots: int, *, has_trees: bool, has_streams: bool
    ) -> None:
        """`params` have the sizes and types of the cache, for all slots together.

        `has_trees`: drafts may be trees, unless there are streams. Raises BackendError.
        """
        self.max_outputs = max(MAX_ROWS, _ROWS_PER_SLOT * slots)
        self.has_trees = has_trees and not has_streams
        count = min(self.max_outputs, _MAX_SEQUENCES) if self.has_trees else slots  # llama.cpp takes no more than rows
        self._slots = frozenset(range(slots))
        self._free = set(self._slots)
        self._spare = list(range(slots, count))
        self._staged, self._last = PendingBatch(self.decode), PendingBatch(self.decode)
        self.native = NativeContext(
            lib,
            model,
            params,
            vocab_size,
            max_outputs=self.max_outputs,
            sequences=count,
            is_cancelled=self._is_cancelled,
            has_streams=has_streams,
        )
        self.is_shared = slots > 1
        size = params.n_ctx // slots
        self.streams = Streams(lib.api, self.native, slots, size, MAX_TOKENS) if has_streams else None

    @property
    def has_streams(self) -> bool:
        return self.streams is not None

    @property
    def is_usable(self) -> bool:
        """Whether it can take another session."""
        return bool(self.native.handle) and not self.native.is_broken

    @property
    def max_nodes(self) -> int:
        """The most nodes of one more draft if each ends a branch."""
        return min(MAX_ROWS - 1, len(self._spare)) if self.has_trees else MAX_ROWS - 1

    def acquire(self) -> SequenceSlot:
        """A slot for one more session, with the lowest id. Raises BackendError if all are taken."""
        if not self._free:
            raise BackendError("all caches of the model are in use.", hint="Use a larger --parallel.")
        sequence = min(self._free)
        self._free.remove(sequence)
        return SequenceSlot(sequence)

    def release(self, slot: SequenceSlot) -> None:
        """Take back a slot, whose sequence is empty. The native context is freed with the last session."""
        self._free.add(slot.sequence)
        self._last.scores.pop(slot.sequence, None)
        if self._free == self._slots:
            self.native.free()

    def acquire_spare(self, n: int) -> list[int]:
        """[n] spare ids, all of whose cells are free; fewer if there are no more."""
        taken, self._spare = self._spare[:n], self._spare[n:]
        return taken

    def release_spare(self, ids: Sequence[int]) -> None:
        """Take back the emptied ids."""
        self._spare += ids

    def peers(self, slot: SequenceSlot) -> BatchPeers:
        """The other sessions with rows in the staged batch, or else in the last one."""
        if not self.is_shared:
            return SOLO
        others = self._peer_scores(slot)
        decoding = [scores.n_tokens for scores in others if not scores.is_prefill]
        return BatchPeers(len(decoding), sum(decoding), len(decoding) < len(others))

    def prefill_chunk(self, slot: SequenceSlot) -> int:
        """Prompt tokens to read in one decode: few while others decode, else an equal share among those who prefill."""
        if not self.is_shared:
            return MAX_TOKENS
        others = self._peer_scores(slot)
        n_prefills = sum(scores.is_prefill for scores in others)
        return _PREFILL_CHUNK_WITH_PEERS if n_prefills < len(others) else MAX_TOKENS // (1 + n_prefills)

    def stage_chain(
        self, slot: SequenceSlot, tokens: Sequence[int], position: int, *, outputs: int, is_prefill: bool
    ) -> LlamaScores:
        """Stage `tokens` one after another from `position` of the session's text; the last `outputs` have scores."""
        fill = partial(self.native.batch.chain, tokens, position, slot.sequence, outputs=outputs)
        return self._stage(slot, fill, len(tokens), outputs, is_prefill=is_prefill)

    def stage_tree(
        self, slot: SequenceSlot, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> LlamaScores:
        """Stage a row for each token, with scores, at its position and in all of its `sequences`."""
        fill = partial(self.native.batch.tree, tokens, positions, sequences)
        return self._stage(slot, fill, len(tokens), len(tokens), is_prefill=False)

    def flush(self, slot: SequenceSlot) -> None:
        """Decode the staged batch if it has rows of `slot`."""
        if slot.sequence in self._staged.scores:
            self.decode()

    def decode(self) -> None:
        """Decode what is staged. Errors are kept in the batch, for every session that reads its scores."""
        for scores in self._last.scores.values():
            scores.copy_rows()
        self._last = batch = self._staged
        token = output = 0
        order = [*batch.scores] if self.streams is None else sorted(batch.scores)
        filled = {} if self.streams is None else self.streams.fill_gaps(order, batch.n_tokens)
        for sequence in sorted([*order, *filled]) if filled else order:
            if sequence in filled:
                self.native.batch.chain((0,), filled[sequence], sequence, outputs=0)
                token += 1
            else:
                token, output = batch.scores[sequence].place(token, output)
        started = perf_counter()
        try:
            batch.outputs = self.native.decode()
            for scores in batch.scores.values():
                scores.copy_states()
        except (Cancelled, BackendError) as error:
            batch.error = error
        batch.seconds = perf_counter() - started
        if self.streams is not None:
            self.streams.end_decode(batch.seconds if batch.error is None else None)
        self._staged = PendingBatch(self.decode)

    def _stage(
        self, slot: SequenceSlot, fill: Callable[[], None], n: int, outputs: int, *, is_prefill: bool
    ) -> LlamaScores:
        batch = self._staged
        is_full = batch.n_tokens + n > MAX_TOKENS or batch.n_outputs + outputs > self.max_outputs
        if is_full:
            self.decode()
        return LlamaScores(slot, self._staged, fill, n, outputs, is_prefill=is_prefill, is_after_flush=is_full)

    def _peer_scores(self, slot: SequenceSlot) -> list[LlamaScores]:
        """The scores of each other session in the staged batch, or else in the last one."""
        latest = {**self._last.scores, **self._staged.scores}
        return [scores for sequence, scores in latest.items() if sequence != slot.sequence]

    def _is_cancelled(self) -> bool:
        """Whether the work of all sessions in the batch is cancelled."""
        return all(scores.is_cancelled for scores in self._last.scores.values())
