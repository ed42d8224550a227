"""A sequence of a llama.cpp context as a Session: prefill, forwards of chains and trees, commit, rewind."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from edgespec.backends.features import Features
from edgespec.backends.llamacpp.context import Context
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.native import MAX_TOKENS
from edgespec.backends.llamacpp.pending import LlamaScores, SequenceSlot
from edgespec.backends.llamacpp.rollback import Rollback, TrimmableCache
from edgespec.backends.llamacpp.taps import Floats, HiddenStates
from edgespec.backends.sequence import check_forward, check_prompt, shared_prefix
from edgespec.core.batching import YIELD, BatchPeers, Yield
from edgespec.core.greedy import greedy_rollout
from edgespec.core.protocols import Capabilities, Draft, PrefillProgress, Session
from edgespec.core.scores import HostScores, Scores
from edgespec.core.tree import branches, depths, is_path, leaves
from edgespec.errors import BackendError, Cancelled, RollbackError

_CHEAP_PREFILL = 64  # tokens that are read again rather than copying the cells of a stream


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
    ) -> None:
        self._lib = lib
        self._context: Context | None = context
        self._slot = slot
        self._rollback = rollback
        self._capabilities = Capabilities(vocab_size, context_size, rollback.tree)
        self._tokens: list[int] = []  # what the cache holds
        self.revision = 0  # grows with every change of them
        self._prompt: tuple[int, HostScores] | None = None  # tokens of the last one that is whole, and its scores
        self._pending: tuple[int, Draft] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def context(self) -> Context:
        """Raises BackendError once the session is closed."""
        if self._context is None:
            raise BackendError("the session is closed.", hint="Open another.")
        return self._context

    @property
    def sequence(self) -> int:
        """Its sequence id in the context."""
        return self._slot.sequence

    @property
    def api(self) -> Any:
        """llama.h's functions."""
        return self._lib.api

    @property
    def peers(self) -> BatchPeers:
        return self.context.peers(self._slot)

    @property
    def tokens(self) -> Sequence[int]:
        """What the cache holds; callers must not change it."""
        return self._tokens

    @property
    def position(self) -> int:
        return len(self._tokens)

    @property
    def draft_limit(self) -> int:
        left = self._capabilities.context_size - len(self._tokens) - 1
        return max(0, min(left, self.context.sequences.max_nodes, self._rollback.max_draft))

    def tap(self, layers: Sequence[int]) -> Features[Floats]:
        """The inputs of these layers, concatenated, of every token that the cache will hold. Replaces an earlier tap.

        The number of layers, or no layer at all, stands for the last hidden state after the final norm. In a shared
        context all decodes then copy these layers. Raises ValueError where the cache holds tokens, Unsupported where
        llama.cpp cannot give these layers of this model.
        """
        if self._tokens or self._slot.is_dirty:
            raise ValueError("a session is tapped before it holds tokens")
        self._slot.tap = HiddenStates(self._lib, self.context.native.handle, layers)
        return self._slot.tap.features

    def untap(self) -> None:
        """Keep no hidden states any more."""
        self._slot.tap = None

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        context = self.context
        check_prompt(tokens, self._capabilities)
        if (known := self._recall(tokens)) is not None:
            self._slot.check()
            yield PrefillProgress(len(tokens), len(tokens), len(tokens))
            return known
        done = reused = self._reuse(tokens)
        while True:
            self._slot.check()
            chunk = tokens[done : done + context.prefill_chunk(self._slot)]
            scores = context.stage_chain(self._slot, chunk, done, outputs=1, is_prefill=True)
            if context.is_shared:
                yield YIELD
            self._wait(scores)
            scores.waited_s = scores.peer_wait_s = 0.0  # this call has waited, not a read of the scores
            self._append(chunk, scores.states)
            done += len(chunk)
            yield PrefillProgress(done, len(tokens), reused)
            if done == len(tokens):
                self._prompt = done, HostScores([scores.logits(0).copy()])
                return scores

    def adopt(self, other: Session, n: int) -> bool:
        context = self.context
        if not isinstance(other, LlamaSession) or other is self or other.context is not context:
            return False
        if self._slot.tap is not None:  # the hidden states have to be computed
            return False
        if context.has_streams and n <= _CHEAP_PREFILL:
            return False
        self.rewind(0)
        n = min(n, other.position)  # without the rows of a forward that is not committed
        end = -1 if context.has_streams else n  # llama.cpp copies whole streams, before the next decode
        self._lib.api.llama_memory_seq_cp(context.native.memory, other.sequence, self.sequence, 0, end)
        self.hold(other.tokens[:n])
        self._prompt = other._prompt if other._prompt is not None and other._prompt[0] <= n else None
        if context.has_streams:
            self._rollback.rewind(n)
        return True

    def hold(self, tokens: Sequence[int]) -> None:
        """The cells of its sequence have been set from outside, to those of `tokens`. New hidden states are zeros."""
        if (tap := self._slot.tap) is not None:
            tap.truncate(shared_prefix(self._tokens, tokens, len(tokens)))
            n = len(tokens) - tap.features.end
            tap.features.append(np.broadcast_to(np.float32(0), (n, tap.width)), n)
        self._tokens, self._prompt = list(tokens), None
        self.revision += 1

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        context = self.context
        if self._pending is not None:
            raise RollbackError("a forward was not committed before the next.", hint="Report this as a bug.")
        check_forward(self, root, draft)
        scores = self._stage(context, root, draft)
        self._pending = (root, draft)
        if not context.is_shared:
            self._wait(scores)
            scores.waited_s = 0.0  # this call has waited
        return scores

    def commit(self, path: Sequence[int]) -> None:
        if self._pending is None:
            raise RollbackError("nothing was forwarded to commit.", hint="Report this as a bug.")
        root, draft = self._pending
        if not is_path(draft, tuple(path)):
            raise ValueError(f"{tuple(path)} is not a path of the draft")
        scores = self._slot.scores
        assert scores is not None
        self._wait(scores)
        start = len(self._tokens)
        kept = [root, *draft.tokens[list(path)].tolist()]
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
            replay = self._tokens[reached:]
            self._forget(reached)
            self._replay(replay)

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        return greedy_rollout(self, tokens, n, vocab_size)

    def checkpoint(self) -> None:
        self._require_open()
        self._rollback.checkpoint(len(self._tokens))
        if self._slot.tap is not None:
            self._slot.tap.checkpoint()

    def rewind(self, position: int) -> int:
        self._require_open()
        self.revision += 1
        if self._slot.is_dirty:
            self.context.flush(self._slot)
            self._drop_pending()
        if not position and self._tokens:
            self._rollback.reset()
            self._forget(0)
        elif position < len(self._tokens):
            self._forget(self._rollback.rewind(position))
        return len(self._tokens)

    def close(self) -> None:
        if (context := self._context) is not None:
            self._context = None
            context.flush(self._slot)
            self._rollback.reset()
            context.release(self._slot)
            self._pending = None

    def _stage(self, context: Context, root: int, draft: Draft) -> LlamaScores:
        tokens, position = [root, *draft.tokens.tolist()], len(self._tokens)
        if draft.is_chain:
            self._rollback.prepare(position, len(draft))
            return context.stage_chain(self._slot, tokens, position, outputs=len(tokens), is_prefill=False)
        assert isinstance(self._rollback, TrimmableCache)
        ids = self._rollback.open_branches(len(leaves(draft)))
        positions = [position, *(depths(draft) + position).tolist()]
        sequences = [ids, *([ids[branch] for branch in each] for each in branches(draft))]
        return context.stage_tree(self._slot, tokens, positions, sequences)

    def _replay(self, tokens: Sequence[int]) -> None:
        """Run accepted tokens again."""
        for i in range(0, len(tokens), MAX_TOKENS):
            chunk = tokens[i : i + MAX_TOKENS]
            scores = self.context.stage_chain(self._slot, chunk, len(self._tokens), outputs=1, is_prefill=True)
            self._wait(scores)
            self._append(chunk, scores.states)

    def _reuse(self, tokens: Sequence[int]) -> int:
        """Keep what the cache holds of a prompt; returns how many tokens.

        Where a head has released the hidden states before that position, it has read them with the token after each but
        the last. That one is computed again, unless a checkpoint has it.
        """
        kept = self.rewind(shared_prefix(self._tokens, tokens, len(tokens) - 1))
        tap = self._slot.tap
        return self.rewind(kept - 1) if tap is not None and kept and tap.features.start == kept else kept

    def _recall(self, tokens: Sequence[int]) -> Scores | None:
        """The scores of a prompt that has just been read, with the cache as it was behind it; None for any other.

        Its last token, read again in a forward of another number of rows, would have scores of another rounding, and a
        greedy answer might change from one request to the next.
        """
        n = len(tokens)
        if self._prompt is None or self._prompt[0] != n or self._tokens[:n] != list(tokens):
            return None
        if self._slot.tap is not None:  # the hidden states have to be computed
            return None
        return self._prompt[1] if self.rewind(n) == n else None

    def _append(self, tokens: Sequence[int], states: Floats | None) -> None:
        """The cache holds `tokens` for good; `states` are of a tapped session."""
        if states is not None:
            assert self._slot.tap is not None
            self._slot.tap.features.append(states, len(tokens))
        self._tokens += tokens
        self._slot.is_dirty = False
        self.revision += 1

    def _forget(self, position: int) -> None:
        """The cache holds no more than `position` tokens."""
        del self._tokens[position:]
        if self._prompt is not None and position < self._prompt[0]:
            self._prompt = None
        if self._slot.tap is not None:
            self._slot.tap.truncate(position)

    def _require_open(self) -> None:
        """Raises BackendError."""
        _ = self.context

    def _wait(self, scores: LlamaScores) -> None:
        """Have `scores` computed. Raises Cancelled after dropping the forward, and BackendError."""
        try:
            scores.read()
        except Cancelled:
            self._drop_pending()
            raise

    def _drop_pending(self) -> None:
        """Trim to the committed tokens, or to fewer where the cache cannot."""
        self._pending = self._slot.scores = None
        self._slot.is_dirty = False
        if isinstance(self._rollback, TrimmableCache):
            at = len(self._tokens)
            self._rollback.commit_branch(0, at, at, in_order=True)
        else:
            self._forget(self._rollback.rewind(len(self._tokens)))
