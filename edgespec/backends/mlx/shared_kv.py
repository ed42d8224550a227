"""A session that drafts beside another on the same model: over its caches, or over excerpts of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.hooks import Hooks, Pass
from edgespec.backends.mlx.keyvalues import SLACK, KeyValues
from edgespec.backends.mlx.lazy_draft import DeviceDraft, chain_rows
from edgespec.backends.mlx.library import computing
from edgespec.backends.mlx.scores import MlxScores
from edgespec.backends.mlx.session import MAX_ROWS, MlxSession
from edgespec.backends.sequence import check_ids, check_prompt, shared_prefix
from edgespec.core.batching import SOLO, BatchPeers, Yield
from edgespec.core.greedy import HostScores
from edgespec.core.protocols import Capabilities, CheckCancelled, Draft, PrefillProgress, Scores, Session
from edgespec.core.tree import check_draft, is_path
from edgespec.errors import BackendError, ContextOverflow, RollbackError


@dataclass(slots=True)
class DraftNetwork:
    """How a model runs when it drafts for itself.

    has_windows  whether any of its caches drops rows that have left its window
    resumes      whether `layers` are its first ones and run as they always do, so that the target can go on from there
    """

    network: Any
    hooks: Hooks
    layers: Sequence[int]
    is_low: bool
    sparse: tuple[int, int] | None
    has_windows: bool
    continues_from_layer: bool


class SharedKVSession:
    """A Session for drafts, which are chains.

    It holds what its target holds, and a tail of its own. The tail is gone once the target runs or forgets anything.
    Where caches have windows, it is at most SLACK tokens long: what follows it may drop rows that the target needs.
    """

    def __init__(self, target: MlxSession, draft: DraftNetwork, check: CheckCancelled) -> None:
        self._target = target
        self._way = draft
        self._check = check
        self._capabilities = replace(target.capabilities, tree=False, shares_kv=True)
        self._closed = False
        self._tail: list[int] = []
        self._unread: DeviceDraft | None = None  # of the last rollout; all but its last token follow the tail
        self._pending: tuple[int, Draft] | None = None
        self._hidden: list[Any] = []  # [1, rows, H] each, of the rows of the tail
        self._caches: list[KeyValues] = []  # in use for the tail

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def position(self) -> int:
        return self._target.position + (self._held if self._target.attached is self else 0)

    @property
    def peers(self) -> BatchPeers:
        return SOLO

    @property
    def draft_limit(self) -> int:
        return max(0, min(self._capabilities.context_size - self.position - 1, MAX_ROWS - 1))

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """Runs what is not held of `tokens`, and their last one unless the target holds it: then the scores have no
        rows.

        Raises RollbackError where the target holds another text.
        """
        self._synchronise()
        self._pending = None
        check_prompt(tokens, self._capabilities)
        base = self._target.position
        self._read()
        held = [*self._target.tokens, *self._tail]
        agreed = shared_prefix(held, tokens, len(tokens))
        if agreed < min(base, len(tokens)):
            raise RollbackError("the target holds another text than its draft.", hint="Report this as a bug.")
        agreed = max(min(base, len(tokens)), min(agreed, len(tokens) - 1))
        self.rewind(agreed)
        scores: Scores = HostScores(())
        if missing := tokens[agreed:]:
            self._require_room(len(missing))
            scores = MlxScores(self._run(mx.array([list(missing)], mx.int32), agreed - base)[-1:])
            self._tail += missing
        yield PrefillProgress(len(tokens), len(tokens))
        return scores

    def adopt(self, other: Session, n: int) -> bool:
        return False

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._begin()
        check_ids((root,), self._capabilities.vocab_size)
        if not draft.is_chain:
            raise ValueError("a draft's own forwards are chains")
        if len(draft) and not isinstance(draft, DeviceDraft):
            check_draft(draft, self._capabilities.vocab_size)
        self._require_room(len(draft) + 1)
        logits = self._run(chain_rows((root,), draft), len(self._tail))
        self._pending = root, draft
        return MlxScores(logits)

    def commit(self, path: Sequence[int]) -> None:
        if self._pending is None:
            raise RollbackError("nothing was forwarded to commit.", hint="Report this as a bug.")
        root, draft = self._pending
        if not is_path(draft, tuple(path)):
            raise ValueError(f"{tuple(path)} is not a path of the draft")
        self._pending = None
        self._tail += [root, *draft.tokens[list(path)].tolist()]

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        self._begin()
        check_ids(tokens, self._capabilities.vocab_size)
        self._require_room(len(tokens) + n - 1)
        rows = [self._run(mx.array([list(tokens)], mx.int32), len(self._tail))[-1:]]
        self._tail += tokens
        best = [mx.argmax(rows[0][:, :vocab_size], axis=-1)]
        while len(best) < n:
            rows.append(self._run(best[-1][None], len(self._tail) + len(best) - 1))
            best.append(mx.argmax(rows[-1][:, :vocab_size], axis=-1))
        self._unread = DeviceDraft(mx.concatenate(best))
        return self._unread, MlxScores(mx.concatenate(rows))

    def checkpoint(self) -> None:
        """Nothing to do: the tail can be cut anywhere."""

    def rewind(self, position: int) -> int:
        self._synchronise()
        self._pending = None
        kept = max(0, position - self._target.position)
        if kept < self._held:
            if kept:
                self._read()
            self._unread = None
            del self._tail[kept:]
        return self.position

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget()
            if self._target.attached is self:
                self._target.attached = None

    def resuming(self, root: int, draft: Draft) -> Callable[[Any], Any] | None:
        """See steps.Attached."""
        if not self._way.continues_from_layer:
            return None
        if draft is self._unread and self._tail == [root]:
            agreed = len(draft)  # the last one was never run
        else:
            self._read()
            certain = [root, *draft.tokens.tolist()]
            agreed = shared_prefix(self._tail, certain, len(certain))
        return partial(self._resume, self._hidden_rows(agreed)) if agreed else None

    def _resume(self, hidden: Any, rows: Any) -> Any:
        """Scores [n, V] of `rows` [1, n], the first of which are `hidden` [1, m, H] where the draft's layers end.

        The caches of those layers hold the first m rows. The caches are at the target's position, and go on to the end.
        """
        draft, base, done = self._way, self._target.position, hidden.shape[1]
        if done < rows.shape[1]:
            self._cut(base + done)
            step = Pass(draft.layers)
            with draft.hooks.passing(step):
                draft.network(rows[:, done:], cache=self._caches)  # beyond the layers nothing of it is ever computed
            hidden = mx.concatenate([hidden, step.left], axis=1)
            self._cut(base)
        others = range(len(draft.layers), len(draft.hooks.layers))
        with draft.hooks.passing(Pass(others, entry=hidden)):
            logits = draft.network(rows, cache=self._caches)[0]
        self._cut(base + rows.shape[1])
        return logits

    def _run(self, tokens: Any, at: int) -> Any:
        """Scores [n, V], handed to the device, of tokens [1, n] that stand `at` rows behind the target's.

        The target's caches are left at the target's position, also where this raises.
        """
        self._check()
        draft, base = self._way, self._target.position
        forwards = self._target.attach(self)
        if not self._caches:
            entries: list[KeyValues] = forwards.caches.entries
            self._caches = [entry.excerpt(*draft.sparse) for entry in entries] if draft.sparse else entries
        step = Pass(draft.layers, draft.is_low)
        try:
            with computing(), draft.hooks.passing(step):
                self._cut(base + at)  # those of layers left out as well: masks are made from any of them
                logits = draft.network(tokens, cache=self._caches)[0]
                mx.async_eval(logits)
        finally:
            self._cut(base)
        if draft.continues_from_layer:
            if sum(hidden.shape[1] for hidden in self._hidden) > at:  # some were taken back
                self._hidden = [self._hidden_rows(at)] if at else []
            self._hidden.append(step.left)
        return logits

    def _hidden_rows(self, n: int) -> Any:
        """[1, n, H] of the first rows of the tail, where the draft's layers end."""
        return mx.concatenate(self._hidden, axis=1)[:, :n]

    def _cut(self, position: int) -> None:
        for cache in self._caches:
            cache.cut(position)

    @property
    def _held(self) -> int:
        return len(self._tail) + (len(self._unread) - 1 if self._unread is not None else 0)

    def _read(self) -> None:
        """Catch up with what the device has drafted."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._tail += unread.tokens[:-1].tolist()

    def _begin(self) -> None:
        self._synchronise()
        self._read()
        if self._pending is not None:
            raise RollbackError("a forward was not committed before the next.", hint="Report this as a bug.")

    def _synchronise(self) -> None:
        """Forget what was run behind a target that has done anything since."""
        if self._closed:
            raise BackendError("the session is closed.", hint="Open another.")
        if self._target.attached is not self:
            self._forget()

    def _forget(self) -> None:
        self._unread = self._pending = None
        self._tail, self._hidden, self._caches = [], [], []

    def _require_room(self, n: int) -> None:
        end = len(self._tail) + n
        most = self._capabilities.context_size - self._target.position
        if end > (min(most, SLACK) if self._way.has_windows else most):
            raise ContextOverflow(f"{n} drafted tokens do not fit.", hint="Report this as a bug.")
