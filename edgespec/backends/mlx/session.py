"""One sequence on an MLX model as a Session: prefill, forward of chains and trees, commit, rewind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx

from edgespec.backends.attached_draft import Features
from edgespec.backends.mlx.cached_tokens import (
    AheadForward,
    CachedTokens,
    CacheTenant,
    FeatureTap,
    ModelRunner,
    PendingForward,
    Rows,
    Snapshot,
    TreeLayout,
)
from edgespec.backends.mlx.hooks import LayerHooks
from edgespec.backends.mlx.scores import DeviceDraft, MlxScores, chain_rows
from edgespec.backends.sequence import check_forward, check_ids, check_prompt, shared_prefix
from edgespec.core.protocols import (
    SOLO,
    Capabilities,
    CheckCancelled,
    Draft,
    PrefillProgress,
    Session,
    Yield,
)
from edgespec.core.scores import Scores
from edgespec.core.tree import is_path
from edgespec.errors import BackendError, ContextOverflow, RollbackError

PREFILL_CHUNK = 512
MAX_ROWS = 64  # a root and 63 draft nodes
_MAX_LAG = 16  # tokens that run again together with the next draft; more of them get a forward of their own


class MlxSession:
    """A Session over mlx-lm's models. The thread that made it owns it."""

    peers = SOLO

    def __init__(
        self,
        open_runner: Callable[[], ModelRunner],
        open_hooks: Callable[[], LayerHooks],
        tree_layout: TreeLayout | None,
        capabilities: Capabilities,
        check: CheckCancelled,
    ) -> None:
        self._cached = CachedTokens(open_runner, check)
        self._open_hooks = open_hooks
        self._tree_layout = tree_layout
        self.capabilities = capabilities
        self._check = check
        self._pending: PendingForward | None = None
        self._ahead: AheadForward | None = None
        self._lazy: DeviceDraft | None = None  # of the last rollout; all but its last token follow the cached ones
        self._is_closed = False

    @property
    def position(self) -> int:
        return len(self._cached) + (len(self._lazy) - 1 if self._lazy is not None else 0)

    @property
    def draft_limit(self) -> int:
        return max(0, min(self.capabilities.context_size - self.position - 1, MAX_ROWS - 1))

    @property
    def tokens(self) -> Sequence[int]:
        """The sequence; callers must not change it."""
        return self._cached.tokens

    @property
    def model(self) -> Any:
        """mlx-lm's model."""
        self._sync()
        return self._cached.runner.model

    @property
    def entries(self) -> Sequence[Any]:
        """The model's caches, which hold all tokens; callers must not change them."""
        self._sync()
        self._require_committed("a draft")
        self._cached.settle()
        entries: Sequence[Any] = self._cached.runner.caches.entries
        return entries

    def tap(self, layers: tuple[int, ...]) -> Features[Any]:
        """Keep the hidden states of every token from now on, of `layers` as in formats.heads.HeadSpec.

        Replaces an earlier tap. Their end is `position`, and rows are arrays of MLX. Raises ValueError for a session
        that holds tokens, Unsupported where the model has no such states.
        """
        self._sync()
        if self.position or self._pending is not None:
            raise ValueError("a session is tapped before it holds tokens")
        tap = FeatureTap(self._open_hooks(), layers)
        self._cached.read_hidden(tap)
        return tap.kept

    def untap(self) -> None:
        """Keep no hidden states any more."""
        self._cached.drop_tap()

    @property
    def bound(self) -> CacheTenant | None:
        """The draft whose rows follow this session's in the caches, until this session computes or drops anything."""
        return self._cached.bound

    def bind(self, draft: CacheTenant) -> ModelRunner:
        """The runner with caches that hold the whole sequence. `draft` has to trim them to `position` after each use.

        Raises RollbackError, BackendError.
        """
        self._require_committed("a draft")
        self._sync()
        self._drop_ahead()
        self._cached.settle()
        self._cached.bound = draft
        return self._cached.runner

    def unbind(self, draft: CacheTenant) -> None:
        """`draft` uses the caches no longer."""
        if self._cached.bound is draft:
            self._cached.bound = None

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        self._sync()
        check_prompt(tokens, self.capabilities)
        done = reused = self._rewind(shared_prefix(self.tokens, tokens, len(tokens) - 1))
        self._cached.settle()
        while done < len(tokens) - 1:  # only the last token is scored
            self._check()
            chunk = tokens[done : min(done + PREFILL_CHUNK, len(tokens) - 1)]
            self._cached.read(chunk)
            done += len(chunk)
            yield PrefillProgress(done, len(tokens), reused)
        self._check()
        rows = self._cached.start(self._cached.runner.run_chain, tokens[-1:])
        self._cached.append(tokens[-1:], rows.features)
        yield PrefillProgress(len(tokens), len(tokens), reused)
        return MlxScores(rows.logits)

    def adopt(self, other: Session, n: int) -> bool:
        return False

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._sync()
        self._require_committed("the next")
        check_forward(self, root, draft, is_on_device=isinstance(draft, DeviceDraft))
        self._check()
        n = len(draft)
        can_run_ahead = run_ahead and not n and len(self._cached) + 2 <= self.capabilities.context_size
        on_token = self._start_ahead if can_run_ahead else None
        ahead = self._ahead
        if ahead is not None and not n and ahead.scores.announced_token == root:
            self._ahead = None
            self._pending = PendingForward(root, draft, ahead.before, ahead.rows.features)
            return MlxScores(ahead.rows.logits, on_token)
        self._drop_ahead()
        if not draft.is_chain or self._cached.lag > _MAX_LAG:
            self._cached.settle()
        before = self._cached.take_snapshot()
        rows = self._start_chain(root, draft, before) if draft.is_chain else self._start_tree(root, draft, before)
        self._pending = PendingForward(root, draft, before, rows.features)
        return MlxScores(rows.logits, on_token, draft)

    def commit(self, path: Sequence[int]) -> None:
        if self._pending is None:
            raise RollbackError("nothing was forwarded to commit.", hint="Report this as a bug.")
        pending, start = self._pending, len(self._cached)
        draft = pending.draft
        if not is_path(draft, tuple(path)):
            raise ValueError(f"{tuple(path)} is not a path of the draft")
        self._pending = None
        self._cached.append([pending.root, *draft.tokens[list(path)].tolist()], pending.features_of(path))
        if not draft.is_chain and self._tree_layout == "branches":
            self._cached.commit_copies(start)
        elif list(path) != list(range(len(path))):
            self._cached.commit_rows(start, [0, *(node + 1 for node in path)])
        else:
            self._cached.commit_chain(start, len(draft) - len(path), pending.before)

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        self._sync()
        self._require_committed("a rollout")
        check_ids(tokens, self.capabilities.vocab_size)
        if len(self._cached) + len(tokens) + n - 1 > self.capabilities.context_size:
            raise ContextOverflow(f"{n} drafted tokens do not fit.", hint="Report this as a bug.")
        self._check()
        self._drop_ahead()
        cached = self._cached
        before = cached.take_snapshot()
        read = cached.start(cached.runner.run_chain, [*cached.lagging_tokens, *tokens], undo=before).skip(cached.lag)
        cached.append(tokens, read.features)
        cached.lag = 0
        rows = [read.skip(len(tokens) - 1)]
        start = cached.snapshots["rollout"] = cached.take_snapshot()
        best = [self._choose_best(rows[0].logits[:, :vocab_size])]
        while len(best) < n:  # the host waits for none of these forwards
            rows.append(self._cached.start(cached.runner.run, best[-1][None], undo=start))
            best.append(self._choose_best(rows[-1].logits[:, :vocab_size]))
        for drafted in rows[1:]:
            cached.keep_features(drafted.features, 1)
        self._lazy = DeviceDraft(mx.concatenate(best))
        return self._lazy, MlxScores(mx.concatenate([each.logits for each in rows]), draft=self._lazy)

    def checkpoint(self) -> None:
        self._sync()
        self._require_committed("a checkpoint")
        self._drop_ahead()
        self._cached.settle()
        self._cached.snapshots["prompt"] = self._cached.take_snapshot(deep=True)

    def rewind(self, position: int) -> int:
        return self._rewind(position)

    def extend(self, n: int) -> int:
        self._sync()
        self._require_committed("an extension")
        self._drop_ahead()
        return self._cached.extend(min(n, self.capabilities.context_size))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pending = self._ahead = self._lazy = None
            self._cached.close()

    def _rewind(self, position: int) -> int:
        self._sync()
        self._drop_pending()
        self._drop_ahead()
        if position >= len(self._cached):
            return len(self._cached)
        return self._cached.rewind(position)

    def _choose_best(self, logits: Any) -> Any:
        """The best token [1] of logits [1, V], on the device."""
        return mx.argmax(logits, axis=-1)

    def _start_chain(self, root: int, draft: Draft, before: Snapshot) -> Rows:
        """The rows of a root and a chain; the lagging tokens run first."""
        rows = chain_rows([*self._cached.lagging_tokens, root], draft)
        # A continuation does not run the first layers of all rows, whose hidden states a tap may want.
        draft_session = self.bound if self._cached.tap is None else None
        continuation = draft_session.find_continuation(root, draft) if draft_session is not None else None
        return self._cached.start(continuation or self._cached.runner.run, rows, undo=before).skip(self._cached.lag)

    def _start_tree(self, root: int, draft: Draft, before: Snapshot) -> Rows:
        run = self._cached.runner.run_tree
        return self._cached.start(run, self._tree_layout, len(self._cached), root, draft, undo=before)

    def _start_ahead(self, scores: MlxScores, token: Any) -> None:
        """Start the next plain forward on the token [1] that `scores` have just decided on."""
        caches = self._cached.runner.caches.take_snapshot()
        before = Snapshot(len(self._cached) + 1, caches)  # the caches hold the root already
        self._ahead = AheadForward(
            scores, self._cached.start(self._cached.runner.run, token[None], undo=before), before
        )

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._cached.restore(ahead.before)

    def _drop_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._ahead = None  # its rows follow those that are dropped here
            self._cached.restore(pending.before)

    def _require_committed(self, purpose: str) -> None:
        """Raises RollbackError."""
        if self._pending is not None:
            raise RollbackError(f"a forward was not committed before {purpose}.", hint="Report this as a bug.")

    def _sync(self) -> None:
        """Append the tokens that a rollout has left on the device. Raises BackendError once the session is closed."""
        if self._is_closed:
            raise BackendError("the session is closed.", hint="Open another.")
        if self._lazy is not None:
            self._cached.tokens += self._lazy.tokens[:-1].tolist()
            self._lazy = None
