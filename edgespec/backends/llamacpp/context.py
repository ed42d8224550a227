"""A llama_context that several sessions share: each stages rows, and the first read of scores has all decoded."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.native import MAX_TOKENS, NativeContext
from edgespec.backends.llamacpp.pending import LlamaScores, PendingBatch, SequenceSlot
from edgespec.backends.llamacpp.sequences import SequenceAllocator
from edgespec.core.batching import SOLO, BatchPeers
from edgespec.errors import BackendError, Cancelled

_PREFILL_CHUNK_WITH_PEERS = 64  # tokens, while other sessions decode and wait for the same forward


class Context:
    """A native context with room for `slots` sessions, each of which is a sequence.

    Either all sequences are over the same cells, and a row's attention passes over those of the others too. Or there
    are streams: each sequence has cells of its own, and drafts are chains. llama.cpp then splits a batch into forwards
    of equally many rows of sequences with consecutive ids.
    """

    def __init__(
        self, lib: Library, model: Any, params: Any, vocab_size: int, slots: int, *, has_trees: bool, has_streams: bool
    ) -> None:
        """`params` have the sizes and types of the cache, for all slots together.

        `has_trees`: drafts may be trees, unless there are streams. Raises BackendError.
        """
        self.sequences = SequenceAllocator(slots, has_trees=has_trees and not has_streams)
        self._staged, self._last = PendingBatch(self.decode), PendingBatch(self.decode)
        self.native = NativeContext(
            lib,
            model,
            params,
            vocab_size,
            max_outputs=self.sequences.max_outputs,
            sequences=self.sequences.count,
            is_cancelled=self._is_cancelled,
            has_streams=has_streams,
        )
        self.is_shared = slots > 1
        self.has_streams = has_streams

    @property
    def is_usable(self) -> bool:
        """Whether it can take another session."""
        return bool(self.native.handle) and not self.native.is_broken

    def release(self, slot: SequenceSlot) -> None:
        """Its sequence is empty. The native context is freed with the last session."""
        self.sequences.release(slot)
        self._last.scores.pop(slot.sequence, None)
        if self.sequences.is_unused:
            self.native.free()

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
        scores = self._stage(slot, len(tokens), outputs, is_prefill=is_prefill)
        self.native.batch.chain(tokens, position, slot.sequence, outputs=outputs)
        return scores

    def stage_tree(
        self, slot: SequenceSlot, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> LlamaScores:
        """Stage one row a token, each with scores, at its own position and in all of its `sequences`."""
        scores = self._stage(slot, len(tokens), len(tokens), is_prefill=False)
        self.native.batch.tree(tokens, positions, sequences)
        return scores

    def flush(self, slot: SequenceSlot) -> None:
        """Decode the staged batch if it has rows of `slot`."""
        if slot.sequence in self._staged.scores:
            self.decode()

    def decode(self) -> None:
        """Decode what is staged. Errors are kept in the batch, for every session that reads its scores."""
        for scores in self._last.scores.values():
            scores.copy_rows()
        self._last = batch = self._staged
        if self.has_streams:
            self.native.batch.reorder(batch.sort())
        started = perf_counter()
        try:
            batch.outputs = self.native.decode()
            for scores in batch.scores.values():
                scores.copy_states()
        except (Cancelled, BackendError) as error:
            batch.error = error
        batch.seconds = perf_counter() - started
        self._staged = PendingBatch(self.decode)

    def _stage(self, slot: SequenceSlot, n: int, outputs: int, *, is_prefill: bool) -> LlamaScores:
        batch, limit = self._staged, self.sequences.max_outputs
        is_full = batch.n_tokens + n > MAX_TOKENS or batch.n_outputs + outputs > limit
        if is_full:
            self.decode()
        return LlamaScores(slot, self._staged, n, outputs, is_prefill=is_prefill, is_after_flush=is_full)

    def _peer_scores(self, slot: SequenceSlot) -> list[LlamaScores]:
        """Of each other session, the scores in the staged batch, or else in the last one."""
        latest = {**self._last.scores, **self._staged.scores}
        return [scores for sequence, scores in latest.items() if sequence != slot.sequence]

    def _is_cancelled(self) -> bool:
        """Whether none of the sessions in the batch wants it any more."""
        return all(scores.slot.is_cancelled for scores in self._last.scores.values())
