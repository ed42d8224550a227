"""One llama.cpp context as a Session: prefill, forward of chains and trees in one decode, commit, rewind."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from edgespec.backends.llamacpp.context import PREFILL_CHUNK, Context, LlamaScores, SequenceSlot
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.rollback import Rollback, TrimmableCache
from edgespec.backends.sequence import check_ids, check_prompt, shared_prefix
from edgespec.core.batching import YIELD, BatchPeers, Yield
from edgespec.core.greedy import greedy_rollout
from edgespec.core.protocols import Capabilities, Draft, PrefillProgress, Scores, Session
from edgespec.core.tree import branches, check_draft, depths, is_path, leaves
from edgespec.errors import BackendError, Cancelled, ContextOverflow, RollbackError


class LlamaSession:
    """A Session over a sequence of a llama.cpp context. Not thread-safe: one thread owns it.

    Where the context is shared, a forward is done when the first of those who have asked for theirs reads its scores.
    """

    def __init__(
        self,
        lib: Library,
        context: Context,
        member: SequenceSlot,
        rollback: Rollback,
        vocab_size: int,
        context_size: int,
    ) -> None:
        self._lib = lib
        self._context: Context | None = context
        self._member = member
        self._rollback = rollback
        self._capabilities = Capabilities(vocab_size, context_size, rollback.tree, frozenset())
        self._tokens: list[int] = []  # what the cache holds
        self.revision = 0  # changes with them
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
        """Which of the context's sequences it is."""
        return self._member.sequence

    @property
    def peers(self) -> BatchPeers:
        return self.context.peers(self._member)

    @property
    def tokens(self) -> Sequence[int]:
        """What the cache holds; not to be changed."""
        return self._tokens

    @property
    def position(self) -> int:
        return len(self._tokens)

    @property
    def draft_limit(self) -> int:
        room = self._capabilities.context_size - len(self._tokens) - 1
        return max(0, min(room, self.context.most_nodes, self._rollback.max_draft))

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        context = self.context
        check_prompt(tokens, self._capabilities)
        done = reused = self.rewind(shared_prefix(self._tokens, tokens, len(tokens) - 1))
        while True:
            self._member.check()
            chunk = tokens[done : done + context.chunk(self._member)]
            scores = context.chain(self._member, chunk, done, outputs=1, reads=True)
            if context.is_shared:
                yield YIELD
            self._finish(scores)
            scores.waited_s = scores.peer_wait_s = 0.0  # it is this call that has waited
            self._grow(chunk)
            done += len(chunk)
            yield PrefillProgress(done, len(tokens), reused)
            if done == len(tokens):
                return scores

    def adopt(self, other: Session, n: int) -> bool:
        context = self.context
        if not isinstance(other, LlamaSession) or other is self or other.context is not context:
            return False
        self.rewind(0)
        n = min(n, other.position)  # what it has computed beyond is not certain to stay
        api, memory = self._lib.api, self._lib.api.llama_get_memory(context.native)
        api.llama_memory_seq_cp(memory, other.sequence, self.sequence, 0, n)
        self._tokens = list(other.tokens[:n])
        self.revision += 1
        return True

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        context = self.context
        if self._pending is not None:
            raise RollbackError("a forward was not committed before the next.", hint="Report this as a bug.")
        check_ids((root,), self._capabilities.vocab_size)
        n, position = len(draft), len(self._tokens)
        if n > self.draft_limit or position >= self._capabilities.context_size:
            raise ContextOverflow(f"{n} drafted tokens do not fit after {position}.", hint="Report this as a bug.")
        if n:
            check_draft(draft, self._capabilities.vocab_size)
        scores = self._stage(context, root, draft, position)
        self._pending = (root, draft)
        if not context.is_shared:
            self._finish(scores)
            scores.waited_s = 0.0  # as above
        return scores

    def commit(self, path: Sequence[int]) -> None:
        if self._pending is None:
            raise RollbackError("nothing was forwarded to commit.", hint="Report this as a bug.")
        root, draft = self._pending
        if not is_path(draft, tuple(path)):
            raise ValueError(f"{tuple(path)} is not a path of the draft")
        assert self._member.current is not None
        self._finish(self._member.current)
        start = len(self._tokens)
        kept = [root, *draft.tokens[list(path)].tolist()]
        end = start + len(kept)
        if draft.is_chain:
            reached = self._rollback.keep(end, start + 1 + len(draft))
        else:
            assert isinstance(self._rollback, TrimmableCache)
            member = branches(draft)
            winner = member[path[-1]][0] if path else 0
            in_order = list(path) == list(range(len(path)))
            reached = self._rollback.keep_branch(winner, start, end, in_order=in_order)
        self._pending = self._member.current = None
        self._grow(kept)
        if reached < end:
            replay = self._tokens[reached:]
            del self._tokens[reached:]
            self._extend(replay)

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        return greedy_rollout(self, tokens, n, vocab_size)

    def checkpoint(self) -> None:
        self._require_open()
        self._rollback.checkpoint(len(self._tokens))

    def rewind(self, position: int) -> int:
        self._require_open()
        self.revision += 1
        if self._member.is_unsettled:
            self._abandon()
        if position < len(self._tokens):
            reached = self._rollback.rewind(position) if position else self._empty()
            del self._tokens[reached:]
        return len(self._tokens)

    def close(self) -> None:
        if (context := self._context) is not None:
            self._context = None
            context.settle(self._member)
            self._rollback.reset()
            context.leave(self._member)
            self._pending = None

    def _stage(self, context: Context, root: int, draft: Draft, position: int) -> LlamaScores:
        tokens = [root, *draft.tokens.tolist()]
        if draft.is_chain:
            self._rollback.before_forward(position, len(draft))
            return context.chain(self._member, tokens, position, outputs=len(tokens), reads=False)
        if not isinstance(self._rollback, TrimmableCache):
            raise ValueError("this model takes chains only")
        ids = self._rollback.open_branches(len(leaves(draft)))
        positions = [position, *(depths(draft) + position).tolist()]
        members = [ids, *([ids[branch] for branch in each] for each in branches(draft))]
        return context.tree(self._member, tokens, positions, members)

    def _extend(self, tokens: Sequence[int]) -> None:
        """Run tokens that are certain to stay."""
        context = self.context
        for i in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[i : i + PREFILL_CHUNK]
            self._finish(context.chain(self._member, chunk, len(self._tokens), outputs=1, reads=True))
            self._grow(chunk)

    def _grow(self, tokens: Sequence[int]) -> None:
        """They are part of the text now."""
        self._tokens += tokens
        self._member.is_unsettled = False
        self.revision += 1

    def _require_open(self) -> None:
        """Raises BackendError."""
        _ = self.context

    def _finish(self, scores: LlamaScores) -> None:
        """Have them computed. Raises Cancelled, having forgotten what was under way; BackendError."""
        try:
            scores.read()
        except Cancelled:
            self._forget()
            raise

    def _abandon(self) -> None:
        """Forget a forward that nobody is going to commit."""
        self.context.settle(self._member)
        self._forget()

    def _forget(self) -> None:
        """Cut to what was committed, or to less where the cache cannot."""
        self._pending = self._member.current = None
        self._member.is_unsettled = False
        if isinstance(self._rollback, TrimmableCache):
            at = len(self._tokens)
            self._rollback.keep_branch(0, at, at, in_order=True)
        else:
            del self._tokens[self._rollback.rewind(len(self._tokens)) :]

    def _empty(self) -> int:
        self._rollback.reset()
        return 0
