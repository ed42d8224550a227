"""A sequence of a llama.cpp context as a Session: prefill, forwards of chains and trees, commit, rewind."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from edgespec.backends.features import Features
from edgespec.backends.llamacpp.cells import Cells
from edgespec.backends.llamacpp.context import Context
from edgespec.backends.llamacpp.hidden_states import Floats, HiddenStates
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.native_context import MAX_TOKENS
from edgespec.backends.llamacpp.rollback import Rollback
from edgespec.backends.llamacpp.scores import LlamaScores, SequenceSlot
from edgespec.backends.llamacpp.tree_branches import TrimmableCache
from edgespec.backends.llamacpp.tree_cache import TreeCache
from edgespec.backends.sequence import (
    cheap_prefill,
    check_committed,
    check_forward,
    check_prompt,
    kept_tokens,
    shared_prefix,
)
from edgespec.cancel import check_cancelled
from edgespec.core.peers import YIELD, BatchPeers, Yield
from edgespec.core.protocols import Capabilities, Draft, PrefillProgress, Session
from edgespec.core.scores import HostScores, Scores
from edgespec.core.tree import branches, depths, leaves
from edgespec.errors import BackendError, Cancelled

_NO_TOKEN = -1  # stands for copied cells; equals no token of a prompt, so that no answer reuses them


class LlamaSession:
    """A Session over a sequence of a llama.cpp context. Not thread-safe: one thread owns it.

    In a shared context `forward` stages its rows. The first session that reads its scores has all of them decoded.
    """

    def __init__(
        self,
        lib: Library,
        context: Context,
        slot: SequenceSlot,
        rollback: Rollback,
        vocab_size: int,
        context_size: int,
        tree_cache: TreeCache | None = None,
    ) -> None:
        """`tree_cache`: where it may be while no other session of the context is in use."""
        self._lib, self.api = lib, lib.api  # llama.h's functions
        self.home = self._cells = Cells(context, slot, rollback)
        self._is_closed = False
        self._tree_cache = tree_cache
        if tree_cache is not None:
            tree_cache.add(self)
        self.capabilities = Capabilities(vocab_size, context_size, rollback.tree)
        self.tokens: list[int] = []  # what the cache holds
        self.revision = 0  # grows with every change of them
        self._prompt: tuple[int, HostScores] | None = None  # tokens of the last one that is whole, and its scores
        self._pending: tuple[int, Draft] | None = None

    @property
    def context(self) -> Context:
        """Raises BackendError once the session is closed."""
        if self._is_closed:
            raise BackendError("the session is closed.")
        return self._cells.context

    @property
    def sequence(self) -> int:
        return self._cells.sequence

    @property
    def _slot(self) -> SequenceSlot:
        return self._cells.slot

    @property
    def _rollback(self) -> Rollback:
        return self._cells.rollback

    @property
    def peers(self) -> BatchPeers:
        return self.context.peers(self._slot)

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def draft_limit(self) -> int:
        left = self.capabilities.context_size - self.position - 1
        return max(0, min(left, self.context.max_nodes, self._rollback.max_draft))

    def tap(self, layers: Sequence[int]) -> Features[Floats]:
        """Keeps hidden states, as in the protocol; all decodes of a shared context then copy these layers."""
        if self.tokens or self._slot.is_dirty:
            raise ValueError("a session is tapped before it holds tokens")
        self._slot.tap = HiddenStates(self._lib, self.context.native.handle, layers)
        return self._slot.tap.features

    def untap(self) -> None:
        self._slot.tap = None

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        _ = self.context  # raises once the session is closed
        check_prompt(tokens, self.capabilities)
        if (known := self._recall(tokens)) is not None:
            check_cancelled()
            yield PrefillProgress(len(tokens), len(tokens), len(tokens))
            return known
        done = reused = self._reuse(tokens)
        while True:
            check_cancelled()
            chunk = self._take_chunk(tokens, done)
            scores = self.context.stage_chain(self._slot, chunk, done, outputs=1, is_prefill=True)
            if self.home.context.is_shared:
                yield YIELD
            self._wait(scores)
            scores.waited_s = scores.peer_wait_s = 0.0  # this call has waited, not a read of the scores
            self._append(chunk, scores.states)
            done += len(chunk)
            yield PrefillProgress(done, len(tokens), reused)
            if done < len(tokens):
                self._rollback.read_to(done)
            else:
                self._prompt = done, HostScores([scores.logits(0).copy()])
                return scores

    def adopt(self, other: Session, n: int) -> bool:
        context = self.context
        if not isinstance(other, LlamaSession) or other is self or other.home.context is not self.home.context:
            return False
        if self._slot.tap is not None:
            return False  # hidden states have to be computed
        if self.home.context.has_streams and n <= cheap_prefill(self.capabilities.context_size):
            return False  # the cells of a whole stream are copied
        n = min(n, other.position)  # without the rows of a forward that is not committed
        if other.context is not context:
            return self._adopt_bytes(other, n)
        self.rewind(0)
        end = -1 if context.has_streams else n  # llama.cpp copies whole streams, before the next decode
        self._lib.api.llama_memory_seq_cp(context.native.memory, other.sequence, self.sequence, 0, end)
        self.hold(other.tokens[:n])
        self._prompt = other._prompt if other._prompt is not None and other._prompt[0] <= n else None
        if context.streams is not None:
            context.streams.copying |= {other.sequence, self.sequence}
            self._rollback.rewind(n)
        return True

    def hold(self, tokens: Sequence[int]) -> None:
        """The cells of its sequence have been set from outside, to those of `tokens`. New hidden states are zeros."""
        if (tap := self._slot.tap) is not None:
            tap.features.rewind(shared_prefix(self.tokens, tokens, len(tokens)))
            n = len(tokens) - tap.features.end
            tap.features.append(np.broadcast_to(np.float32(0), (n, tap.width)), n)
        self.tokens, self._prompt = list(tokens), None
        self.revision += 1

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        context = self.context
        check_committed(self._pending)
        check_forward(self, root, draft)
        scores = self._stage(context, root, draft)
        self._pending = (root, draft)
        if not context.is_shared:
            self._wait(scores)
            scores.waited_s = 0.0  # this call has waited
        return scores

    def commit(self, path: Sequence[int]) -> None:
        kept, scores = kept_tokens(self._pending, path), self._slot.scores
        assert self._pending is not None and scores is not None
        self._wait(scores)
        draft, start = self._pending[1], len(self.tokens)
        end = start + len(kept)
        if draft.is_chain:
            reached = self._rollback.commit(end, start + 1 + len(draft))
        else:
            assert isinstance(self._rollback, TrimmableCache)
            winner = branches(draft)[path[-1]][0] if path else 0
            in_order = list(path) == list(range(len(path)))
            reached = self._rollback.commit_branch(winner, start, end, in_order=in_order)
        self._pending = self._slot.scores = None
        self._append(kept, None if scores.states is None else scores.states[[0, *(1 + node for node in path)]])
        if reached < end:
            replay = self.tokens[reached:]
            self._forget(reached)
            self._replay(replay)

    def checkpoint(self) -> None:
        _ = self.context  # raises once the session is closed
        self._rollback.checkpoint(len(self.tokens))
        if self._slot.tap is not None:
            self._slot.tap.features.checkpoint()

    def rewind(self, position: int) -> int:
        _ = self.context  # raises once the session is closed
        self.revision += 1
        if self._slot.is_dirty:
            self.context.flush(self._slot)
            self._drop_pending()
        if not position and self.tokens:
            self._rollback.reset()
            self._forget(0)
        elif position < len(self.tokens):
            self._forget(self._rollback.rewind(position))
        return len(self.tokens)

    def extend(self, n: int) -> int:
        """Makes the cache hold `n` tokens by copies of its cells, as backends.long_context.extend_cache says.

        llama.cpp cannot move cells of recurrent states, of several positions a token, and of sliding windows, where it
        aborts if all layers have one. It rounds a quantized cache once more, so no other session may hold a text in it.
        """
        api, context = self.api, self.context
        native = context.native
        held, n = self.position, min(n, self.capabilities.context_size)
        if not 0 < held < n or api.llama_model_n_swa(api.llama_get_model(native.handle)):
            return held
        spare = context.acquire_spare(1)
        if spare and self.capabilities.tree and api.llama_memory_can_shift(native.memory):
            (copy,), saved, size = spare, None, 0
            while held < n:
                if (next_size := min(MAX_TOKENS, held, n - held)) != size:
                    size = next_size
                    saved = self.save_cells(copy, [range(size)])
                if saved is None or not api.llama_state_seq_set_data(native.handle, saved, len(saved), copy):
                    break
                api.llama_memory_seq_add(native.memory, copy, -1, -1, held)
                api.llama_memory_seq_cp(native.memory, copy, self.sequence, -1, -1)
                api.llama_memory_seq_rm(native.memory, copy, -1, -1)
                held += size
            self.hold([*self.tokens, *[_NO_TOKEN] * (held - self.position)])
        context.release_spare(spare)
        return held

    @property
    def can_cut(self) -> bool:
        return isinstance(self._rollback, TrimmableCache)

    def save_state(self, limit: int) -> memoryview | None:
        check_committed(self._pending, "it is saved")
        return self._cells.read(self.api, limit) if self.tokens else None

    def restore_state(self, tokens: Sequence[int], state: memoryview) -> bool | None:
        if self._cells.is_copying:
            return None  # the copy would overwrite it, or have it in place of the text
        self.rewind(0)
        if not self._cells.write(self.api, state):
            self._rollback.reset()
            return False
        self.hold(tokens)
        if self._slot.tap is not None:  # a head begins behind them
            self._slot.tap.features.skip_to(len(tokens))
        self._rollback.checkpoint(len(tokens))
        return True

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed, self._pending = True, None
        try:
            self._cells.context.flush(self._slot)
            self._rollback.reset()
        finally:
            self.home.context.release(self.home.slot)
            if self._tree_cache is not None:
                self._tree_cache.remove(self)

    def settle(self, *, alone: bool) -> None:
        if self._tree_cache is not None:
            self._tree_cache.settle(self, alone=alone)

    def move(self, cells: Cells) -> bool:
        """Copy the text to other cells, which are empty, and go on there; returns whether that was possible.

        Not between forward and commit. Raises BackendError.
        """
        check_committed(self._pending, "it is moved")
        if self._cells.is_copying or cells.is_copying:
            return False
        if self.tokens and ((state := self._cells.read(self.api)) is None or not cells.write(self.api, state)):
            cells.rollback.reset()
            return False
        tap, self._slot.tap = self._slot.tap, None
        if tap is not None:
            cells.slot.tap = tap.follow(cells.context.native.handle)
        self._rollback.reset()
        self._cells = cells
        self.capabilities = replace(self.capabilities, tree=cells.rollback.tree)
        return True

    def save_cells(self, spare: int, positions: Sequence[range]) -> ctypes.Array[ctypes.c_uint8] | None:
        """Cells of the text in llama.cpp's format, read through a spare sequence; None if it cannot read them."""
        api, native = self.api, self.context.native
        for span in positions:
            api.llama_memory_seq_cp(native.memory, self.sequence, spare, span.start, span.stop)
        size = api.llama_state_seq_get_size(native.handle, spare)
        saved = (ctypes.c_uint8 * size)()
        n_read = api.llama_state_seq_get_data(native.handle, saved, size, spare)
        api.llama_memory_seq_rm(native.memory, spare, -1, -1)
        return saved if n_read == size else None

    def _adopt_bytes(self, other: LlamaSession, n: int) -> bool:
        """`adopt` from a session whose cells are in another context."""
        if self._cells.is_copying or (state := other._cells.read(self.api)) is None:
            return False
        self.rewind(0)
        if not self._cells.write(self.api, state):
            self._rollback.reset()
            return False
        self.hold(other.tokens[:n])
        self._rollback.rewind(n)  # it has rows of a forward too that is not committed
        self._prompt = other._prompt if other._prompt is not None and other._prompt[0] <= n else None
        return True

    def _stage(self, context: Context, root: int, draft: Draft) -> LlamaScores:
        tokens, position = [root, *draft.tokens.tolist()], len(self.tokens)
        if draft.is_chain:
            self._rollback.prepare(position, len(draft))
            return context.stage_chain(self._slot, tokens, position, outputs=len(tokens), is_prefill=False)
        assert isinstance(self._rollback, TrimmableCache)
        ids = self._rollback.open_branches(len(leaves(draft)))
        positions = [position, *(depths(draft) + position).tolist()]
        sequences = [ids, *([ids[branch] for branch in each] for each in branches(draft))]
        return context.stage_tree(self._slot, tokens, positions, sequences)

    def _take_chunk(self, tokens: Sequence[int], start: int) -> Sequence[int]:
        """The part of a prompt from `start` on that the next forward reads."""
        return tokens[start : start + self.context.prefill_chunk(self._slot)]

    def _replay(self, tokens: Sequence[int]) -> None:
        for i in range(0, len(tokens), MAX_TOKENS):
            chunk = tokens[i : i + MAX_TOKENS]
            scores = self.context.stage_chain(self._slot, chunk, len(self.tokens), outputs=1, is_prefill=True)
            self._wait(scores)
            self._append(chunk, scores.states)

    def _reuse(self, tokens: Sequence[int]) -> int:
        """Keep what the cache holds of a prompt; returns how many tokens.

        If a head has released the hidden states before that position, it has read them with the token after each but
        the last. That one is computed again, unless a checkpoint has it.
        """
        kept = self.rewind(shared_prefix(self.tokens, tokens, len(tokens) - 1))
        tap = self._slot.tap
        return self.rewind(kept - 1) if tap is not None and kept and tap.features.start == kept else kept

    def _recall(self, tokens: Sequence[int]) -> Scores | None:
        """The scores of a prompt that has just been read, with the cache as it was behind it; None for any other.

        Its last token, read again in a forward of another number of rows, would have scores of another rounding, and a
        greedy answer might change from one request to the next.
        """
        n = len(tokens)
        if self._prompt is None or self._prompt[0] != n or self.tokens[:n] != list(tokens):
            return None
        known = self._prompt[1] if self.rewind(n) == n else None
        tap = self._slot.tap
        return known if tap is None or tap.features.start < n else None  # a head reads the state before the next token

    def _append(self, tokens: Sequence[int], states: Floats | None) -> None:
        """The cache holds `tokens` for good; `states` are of a tapped session."""
        if states is not None:
            assert self._slot.tap is not None
            self._slot.tap.features.append(states, len(tokens))
        self.tokens += tokens
        self._slot.is_dirty = False
        self.revision += 1

    def _forget(self, position: int) -> None:
        """The cache holds no more than `position` tokens."""
        del self.tokens[position:]
        if self._prompt is not None and position < self._prompt[0]:
            self._prompt = None
        if self._slot.tap is not None:
            self._slot.tap.features.rewind(position)

    def _wait(self, scores: LlamaScores) -> None:
        """Have `scores` computed. Raises Cancelled after dropping the forward, and BackendError."""
        try:
            scores.read()
        except Cancelled:
            self._drop_pending()
            raise

    def _drop_pending(self) -> None:
        """Trim to the committed tokens, or to fewer if the cache cannot."""
        self._pending = self._slot.scores = None
        self._slot.is_dirty = False
        if isinstance(self._rollback, TrimmableCache):
            at = len(self.tokens)
            self._rollback.commit_branch(0, at, at, in_order=True)
        else:
            self._forget(self._rollback.rewind(len(self.tokens)))
