"""One sequence on an MLX model as a Session: prefill, forward of chains and trees, commit, rewind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from edgespec.backends.head_session import Features
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.runner import FeatureTap, LayerHooks, ModelRunner
from edgespec.backends.mlx.scores import DeviceDraft, MlxScores, chain_rows, find_best, greedy_chain
from edgespec.backends.sequence import (
    check_committed,
    check_forward,
    check_ids,
    check_prompt,
    kept_tokens,
    shared_prefix,
)
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
from edgespec.errors import BackendError, Cancelled, ContextOverflow

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
        capabilities: Capabilities,
        check: CheckCancelled,
    ) -> None:
        self._cached = CachedTokens(open_runner, check)
        self._open_hooks = open_hooks
        self.capabilities = capabilities
        self._check = check
        self._pending: PendingForward | None = None
        # A plain forward that was started on the first token of these scores before the host had read that token
        self._ahead: tuple[MlxScores, Rows, Snapshot] | None = None
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
        check_committed(self._pending, "a draft")
        self._cached.settle()
        entries: Sequence[Any] = self._cached.runner.caches.entries
        return entries

    def tap(self, layers: Sequence[int]) -> Features[Any]:
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
        self._cached.tap = self._cached.runner.tap = None

    @property
    def bound(self) -> CacheTenant | None:
        """The draft whose rows follow this session's in the caches, until this session computes or drops anything."""
        return self._cached.bound

    def bind(self, draft: CacheTenant) -> ModelRunner:
        """The runner with caches that hold the whole sequence. `draft` has to trim them to `position` after each use.

        Raises RollbackError, BackendError.
        """
        check_committed(self._pending, "a draft")
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
        done = reused = self._reuse(tokens)
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
        check_committed(self._pending)
        check_forward(self, root, draft, is_on_device=isinstance(draft, DeviceDraft))
        self._check()
        n = len(draft)
        can_run_ahead = run_ahead and not n and len(self._cached) + 2 <= self.capabilities.context_size
        on_token = self._start_ahead if can_run_ahead else None
        ahead = self._ahead
        if ahead is not None and not n and ahead[0].announced_token == root:
            self._ahead = None
            self._pending = PendingForward(root, draft, *ahead[1:])
            return MlxScores(ahead[1].logits, on_token)
        self._drop_ahead()
        if not draft.is_chain or self._cached.lag > _MAX_LAG:
            self._cached.settle()
        before = self._cached.take_snapshot()
        rows = self._start_chain(root, draft, before) if draft.is_chain else self._start_tree(root, draft, before)
        self._pending = PendingForward(root, draft, rows, before)
        return MlxScores(rows.logits, on_token, draft)

    def commit(self, path: Sequence[int]) -> None:
        pending = self._pending
        tokens = kept_tokens(None if pending is None else (pending.root, pending.draft), path)
        assert pending is not None
        self._pending = None
        self._cached.commit(tokens, [0, *(node + 1 for node in path)], pending)

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        self._sync()
        check_committed(self._pending, "a rollout")
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
        start = cached.snapshots["rollout"] = cached.take_snapshot()
        later: list[Any] = []  # features of the drafted tokens

        def run(token: Any) -> Any:
            following = cached.start(cached.runner.run, token[None], undo=start)
            later.append(following.features)
            return following.logits

        first = read.skip(len(tokens) - 1).logits
        self._lazy, scores = greedy_chain(first, run, n, vocab_size, self._choose_best)
        for features in later:
            cached.keep_features(features, 1)
        return self._lazy, scores

    def checkpoint(self) -> None:
        self._sync()
        check_committed(self._pending, "a checkpoint")
        self._drop_ahead()
        self._cached.settle()
        self._cached.snapshots["prompt"] = self._cached.take_snapshot(deep=True)
        if self._cached.tap is not None:
            self._cached.tap.kept.checkpoint()

    def rewind(self, position: int) -> int:
        return self._rewind(position)

    def extend(self, n: int) -> int:
        self._sync()
        check_committed(self._pending, "an extension")
        self._drop_ahead()
        return self._cached.extend(min(n, self.capabilities.context_size))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pending = self._ahead = self._lazy = None
            self._cached.close()

    def _reuse(self, tokens: Sequence[int]) -> int:
        """Keep what the caches hold of a prompt; returns how many tokens. A head needs the last one's hidden state."""
        kept = self._rewind(shared_prefix(self.tokens, tokens, len(tokens) - 1))
        tap = self._cached.tap
        return self._rewind(kept - 1) if tap is not None and kept and tap.kept.start == kept else kept

    def _rewind(self, position: int) -> int:
        self._sync()
        self._drop_pending()
        self._drop_ahead()
        if position >= len(self._cached):
            return len(self._cached)
        return self._cached.rewind(position)

    def _choose_best(self, logits: Any) -> Any:
        return find_best(logits)

    def _start_chain(self, root: int, draft: Draft, before: Snapshot) -> Rows:
        """The rows of a root and a chain; the lagging tokens run first."""
        rows = chain_rows([*self._cached.lagging_tokens, root], draft)
        # A continuation does not run the first layers of all rows, whose hidden states a tap may want.
        draft_session = self.bound if self._cached.tap is None else None
        continuation = draft_session.find_continuation(root, draft) if draft_session is not None else None
        return self._cached.start(continuation or self._cached.runner.run, rows, undo=before).skip(self._cached.lag)

    def _start_tree(self, root: int, draft: Draft, before: Snapshot) -> Rows:
        run = self._cached.runner.run_tree
        return self._cached.start(run, len(self._cached), root, draft, undo=before)

    def _start_ahead(self, scores: MlxScores, token: Any) -> None:
        """Start the next plain forward on the token [1] that `scores` have just decided on."""
        caches = self._cached.runner.caches.take_snapshot()
        before = Snapshot(len(self._cached) + 1, caches)  # the caches hold the root already
        self._ahead = scores, self._cached.start(self._cached.runner.run, token[None], undo=before), before

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._cached.restore(ahead[2])

    def _drop_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._ahead = None  # its rows follow those that are dropped here
            self._cached.restore(pending.before)

    def _sync(self) -> None:
        """Append the tokens that a rollout has left on the device. Raises BackendError once the session is closed."""
        if self._is_closed:
            raise BackendError("the session is closed.", hint="Open another.")
        if self._lazy is not None:
            self._cached.tokens += self._lazy.tokens[:-1].tolist()
            self._lazy = None


# The tokens of the sequence and the model's caches, which hold all of them but the last few.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the caches that holds `position` tokens and can be restored."""

    position: int
    caches: list[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a forward computes, on the device: scores [n, V], and features [n, width] where the session has a tap."""

    logits: Any
    features: Any = None

    def skip(self, n: int) -> Rows:
        """All but the first `n` rows."""
        return Rows(self.logits[n:], None if self.features is None else self.features[n:]) if n else self


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A forward that was not committed yet, and the caches before it."""

    root: int
    draft: Draft
    rows: Rows
    before: Snapshot


class CacheTenant(Protocol):
    """A draft session that keeps provisional rows behind the target's in its caches."""

    def find_continuation(self, root: int, draft: Draft) -> Callable[[Any], Any] | None:
        """A function from the rows [1, n] of this chain to their scores [n, V], which uses what the draft has computed
        of them; None where it has computed nothing of them."""


NO_TOKEN = -1  # stands for copied rows; equals no token of a prompt, so that no answer reuses them
_CLEAR_PERIOD = 256  # tokens


class CachedTokens:
    """A token sequence with the caches of `runner`.

    Caches that cannot be trimmed (recurrent layers) return to a snapshot when a draft is rejected. They then lack the
    accepted tokens, the last `lag` of the sequence, until those run again with the next forward.
    """

    def __init__(self, open_runner: Callable[[], ModelRunner], check: CheckCancelled) -> None:
        self.tap: FeatureTap | None = None
        self.runner = open_runner()
        self.tokens: list[int] = []
        self.lag = 0
        self.snapshots: dict[str, Snapshot] = {}  # of the prompt, and of the last rollout
        self.bound: CacheTenant | None = None  # until any forward or trim
        self._open_runner = open_runner
        self._check = check

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lagging_tokens(self) -> list[int]:
        """The last tokens, which the caches do not hold."""
        return self.tokens[len(self.tokens) - self.lag :]

    def take_snapshot(self, *, deep: bool = False) -> Snapshot:
        """The caches as they are; a deep one outlives any number of further tokens."""
        return Snapshot(len(self.tokens) - self.lag, self.runner.caches.take_snapshot(deep=deep))

    def restore(self, snapshot: Snapshot) -> None:
        """Return the caches to `snapshot`, which was taken at the present length."""
        self.runner.caches.restore(snapshot.caches)

    def read_hidden(self, tap: FeatureTap) -> None:
        """Keep the features of `tap` from now on. Raises Unsupported where the model has none."""
        trial = self._open_runner()
        trial.tap = tap
        with map_errors():
            trial.run_chain([0, 0])  # builds a forward, and computes nothing
        self.tap = self.runner.tap = tap

    def start(self, run: Callable[..., Any], *args: Any, undo: Snapshot | None = None) -> Rows:
        """The rows of a forward that was handed to the device. On failure the caches return to `undo`.

        Raises BackendError, Cancelled.
        """
        try:
            with map_errors():
                rows = Rows(run(*args), self.runner.features)
                mx.async_eval(rows.logits, rows.features, self.runner.caches.recurrent)
        except (BackendError, Cancelled):
            if undo is not None:
                self.restore(undo)
            raise
        finally:
            self.bound = None
        return rows

    def append(self, tokens: Sequence[int], features: Any) -> None:
        """The caches hold `tokens` as well; `features` [n, width] are theirs, None without a tap."""
        start = len(self.tokens)
        self.tokens += tokens
        self.keep_features(features, len(tokens))
        if len(self.tokens) // _CLEAR_PERIOD > start // _CLEAR_PERIOD:
            mx.clear_cache()  # buffers that the caches have outgrown

    def keep_features(self, features: Any, n: int) -> None:
        """Those of the next `n` positions, where there is a tap."""
        if self.tap is not None:
            self.tap.kept.append(features, n)

    def read(self, tokens: Sequence[int]) -> None:
        """Run and append accepted tokens, and wait. Raises BackendError, Cancelled; then nothing has changed."""
        self.run(tokens)
        self.append(tokens, self.runner.features)

    def run(self, tokens: Sequence[int]) -> None:
        """Run accepted tokens without scores, and wait. On failure the caches are as before.

        Raises BackendError, Cancelled.
        """
        before = self.runner.caches.take_snapshot()
        try:
            with map_errors(), self.runner.context.poll_layers(self._check):
                self.runner.run_chain(tokens)  # MLX computes only what is evaluated, so no scores
                mx.eval(self.runner.caches.state, self.runner.features)
        except (BackendError, Cancelled):
            self.runner.caches.restore(before)
            raise
        finally:
            self.bound = None
        mx.clear_cache()

    def settle(self) -> None:
        """Run the tokens that the caches lack."""
        if self.lag:
            self.run(self.lagging_tokens)
            self.lag = 0

    def commit(self, tokens: Sequence[int], rows: Sequence[int], pending: PendingForward) -> None:
        """The caches hold `tokens` as well, which were these `rows` of a forward; drop its others."""
        caches, start, features = self.runner.caches, len(self.tokens), pending.rows.features
        is_first = list(rows) == list(range(len(rows)))
        if features is not None:
            features = features[: len(rows)] if is_first else features[mx.array(rows)]
        self.append(tokens, features)
        is_whole = len(rows) == 1 + len(pending.draft)
        if is_whole or caches.can_trim:
            self.lag = 0
            if not is_whole:
                caches.keep(start, rows)
        else:
            self.restore(pending.before)
            self.lag = len(self.tokens) - pending.before.position

    def rewind(self, position: int) -> int:
        """Drop all tokens from `position` on, or more where the caches cannot; returns how many are left."""
        self.bound = None
        caches, held = self.runner.caches, len(self.tokens) - self.lag
        if position >= held:
            reached, self.lag = position, position - held
        elif caches.can_rewind(position):
            caches.keep(position)
            reached, self.lag = position, 0
        else:
            reached = self._restore_latest(position)
        del self.tokens[reached:]
        if self.tap is not None:
            self.tap.kept.rewind(reached)
        self.snapshots = {name: each for name, each in self.snapshots.items() if each.position <= reached}
        return reached

    def extend(self, n: int) -> int:
        """Hold copies of the present rows as tokens up to `n`; returns how many are held. Raises BackendError."""
        self.settle()
        if 0 < len(self.tokens) < n and self.runner.caches.extend(n):
            self.bound = None
            more = n - len(self.tokens)
            width = self.runner.features.shape[-1] if self.tap is not None else 0
            self.append([NO_TOKEN] * more, mx.broadcast_to(mx.zeros(width), (more, width)))
            with map_errors():
                mx.eval(self.runner.caches.state)
        return len(self.tokens)

    def close(self) -> None:
        """Free the caches."""
        del self.runner
        self.snapshots = {}
        mx.clear_cache()

    def _restore_latest(self, position: int) -> int:
        """Restore the latest snapshot at or before `position`, else empty caches; returns how many tokens are left."""
        caches = self.runner.caches
        usable = [s for s in self.snapshots.values() if s.position <= position and caches.can_restore(s.caches)]
        self.lag = 0
        if usable:
            latest = max(usable, key=lambda snapshot: snapshot.position)
            self.restore(latest)
            return latest.position
        self.runner = self._open_runner()
        self.runner.tap = self.tap
        self.snapshots = {}
        return 0
