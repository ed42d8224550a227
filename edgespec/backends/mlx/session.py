"""One sequence on an MLX model as a Session: prefill, forward of chains and trees, commit, rewind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from edgespec.backends.checkpoints import Checkpoints
from edgespec.backends.features import Features
from edgespec.backends.mlx.hooks import LayerHooks
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.runner import FeatureTap, ModelRunner
from edgespec.backends.mlx.scores import DeviceDraft, MlxScores, chain_rows, find_best, greedy_chain
from edgespec.backends.sequence import (
    check_committed,
    check_forward,
    check_ids,
    check_prompt,
    kept_tokens,
    shared_prefix,
)
from edgespec.cancel import check_cancelled
from edgespec.core.peers import SOLO, Yield
from edgespec.core.protocols import NO_DRAFT, Capabilities, Draft, PrefillProgress, Session
from edgespec.core.scores import Scores
from edgespec.errors import BackendError, Cancelled, ContextOverflow

if TYPE_CHECKING:
    from edgespec.backends.mlx.shared_kv import SharedKVSession

PREFILL_CHUNK = 512
MAX_ROWS = 64  # a root and 63 draft nodes
_MAX_LAG = 16  # tokens that run again together with the next draft; more of them get a forward of their own
NO_TOKEN = -1  # stands for copied rows; equals no token of a prompt, so that no answer reuses them
_CLEAR_PERIOD = 256  # tokens


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the caches that holds `position` tokens and can be restored."""

    position: int
    caches: list[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a forward computes, on the device: scores [n, V], and features [n, width] if the session has a tap."""

    logits: Any
    features: Any = None

    def skip(self, n: int) -> Rows:
        return Rows(self.logits[n:], None if self.features is None else self.features[n:]) if n else self


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward that was not committed yet, and the caches before it.

    after  of a forward that was started early: the scores whose first token is its root. The root is known once the
           host has read that token
    """

    rows: Rows
    before: Snapshot
    draft: Draft = NO_DRAFT
    root: int = NO_TOKEN
    after: MlxScores | None = None

    def follows(self, root: int) -> bool:
        """Whether it was started on `root`."""
        return self.after is not None and self.after.announced_token == root


class MlxSession:
    """A Session over mlx-lm's models. The thread that made it owns it.

    Caches that cannot be trimmed (recurrent layers) return to a snapshot when a draft is rejected. They then lack the
    accepted tokens, the last `_lag` of the sequence, until those run again with the next forward.

    tokens  the sequence; callers must not change it
    bound   the draft whose rows follow this session's in the caches, until this session computes or drops anything
    """

    peers = SOLO

    def __init__(
        self, open_runner: Callable[[], ModelRunner], open_hooks: Callable[[], LayerHooks], capabilities: Capabilities
    ) -> None:
        self.capabilities = capabilities
        self.tokens: list[int] = []
        self.bound: SharedKVSession | None = None
        self._open_runner, self._open_hooks = open_runner, open_hooks
        self._runner = open_runner()
        self._lag = 0
        self._checkpoints = Checkpoints[list[Any]]()
        self._pending: Forward | None = None
        self._ahead: Forward | None = None  # which was started early
        self._lazy: DeviceDraft | None = None  # of the last rollout; all but its last token follow `tokens`
        self._is_closed = False

    @property
    def position(self) -> int:
        return len(self.tokens) + (len(self._lazy) - 1 if self._lazy is not None else 0)

    @property
    def draft_limit(self) -> int:
        return max(0, min(self.capabilities.context_size - self.position - 1, MAX_ROWS - 1))

    @property
    def model(self) -> Any:
        self._sync()
        return self._runner.model

    @property
    def entries(self) -> Sequence[Any]:
        """The model's caches, which hold all tokens; callers must not change them."""
        self._sync()
        check_committed(self._pending, "a draft")
        self._settle()
        entries: Sequence[Any] = self._runner.caches.entries
        return entries

    def tap(self, layers: Sequence[int]) -> Features[Any]:
        self._sync()
        if self.position or self._pending is not None:
            raise ValueError("a session is tapped before it holds tokens")
        tap, trial = FeatureTap(self._open_hooks(), layers), self._open_runner()
        trial.tap = tap
        with map_errors():
            trial.run_chain([0, 0])  # builds a forward, and computes nothing
        self._runner.tap = tap
        return tap.kept

    def untap(self) -> None:
        self._runner.tap = None

    def bind(self, draft: SharedKVSession) -> ModelRunner:
        """The runner of the whole text, which `draft` trims to `position`. Raises RollbackError, BackendError."""
        check_committed(self._pending, "a draft")
        self._sync()
        self._drop_ahead()
        self._settle()
        self.bound = draft
        return self._runner

    def _poll(self) -> None:
        check_cancelled()

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        self._sync()
        check_prompt(tokens, self.capabilities)
        done = reused = self._reuse(tokens)
        self._settle()
        while done < len(tokens) - 1:  # only the last token is scored
            self._poll()
            chunk = tokens[done : min(done + PREFILL_CHUNK, len(tokens) - 1)]
            self._run(chunk)
            self._append(chunk, self._runner.features)
            done += len(chunk)
            yield PrefillProgress(done, len(tokens), reused)
            if self._checkpoints.is_due(done):
                self._keep_checkpoint()
        self._poll()
        rows = self._start(self._runner.run_chain, tokens[-1:])
        self._append(tokens[-1:], rows.features)
        yield PrefillProgress(len(tokens), len(tokens), reused)
        return MlxScores(rows.logits)

    def adopt(self, other: Session, n: int) -> bool:
        return False

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._sync()
        check_committed(self._pending)
        check_forward(self, root, draft, is_on_device=isinstance(draft, DeviceDraft))
        self._poll()
        n = len(draft)
        can_run_ahead = run_ahead and not n and len(self.tokens) + 2 <= self.capabilities.context_size
        on_token = self._start_ahead if can_run_ahead else None
        ahead = self._ahead
        if ahead is not None and not n and ahead.follows(root):
            self._ahead = None
            self._pending = replace(ahead, root=root)
            return MlxScores(ahead.rows.logits, on_token)
        self._drop_ahead()
        if not draft.is_chain or self._lag > _MAX_LAG:
            self._settle()
        before = self._take_snapshot()
        rows = (
            self._start_chain(root, draft, before)
            if draft.is_chain
            else self._start(self._runner.run_tree, len(self.tokens), root, draft, undo=before)
        )
        self._pending = Forward(rows, before, draft, root)
        return MlxScores(rows.logits, on_token, draft)

    def commit(self, path: Sequence[int]) -> None:
        pending = self._pending
        tokens = kept_tokens(None if pending is None else (pending.root, pending.draft), path)
        assert pending is not None
        self._pending = None
        caches, start, features = self._runner.caches, len(self.tokens), pending.rows.features
        rows = [0, *(node + 1 for node in path)]
        if features is not None:
            is_first = rows == list(range(len(rows)))
            features = features[: len(rows)] if is_first else features[mx.array(rows)]
        self._append(tokens, features)
        is_whole = len(rows) == 1 + len(pending.draft)
        if is_whole or caches.can_trim:
            self._lag = 0
            if not is_whole:
                caches.keep(start, rows)
        else:
            caches.restore(pending.before.caches)
            self._lag = len(self.tokens) - pending.before.position

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        self._sync()
        check_committed(self._pending, "a rollout")
        check_ids(tokens, self.capabilities.vocab_size)
        if len(self.tokens) + len(tokens) + n - 1 > self.capabilities.context_size:
            raise ContextOverflow(f"{n} drafted tokens do not fit.", hint="Report this as a bug.")
        self._poll()
        self._drop_ahead()
        runner, before = self._runner, self._take_snapshot()
        read = self._start(runner.run_chain, [*self._lagging_tokens, *tokens], undo=before).skip(self._lag)
        self._append(tokens, read.features)
        self._lag = 0
        start = self._take_snapshot()
        self._checkpoints.keep_for_now(start.position, start.caches)
        later: list[Any] = []  # features of the drafted tokens

        def run(token: Any) -> Any:
            following = self._start(runner.run, token[None], undo=start)
            later.append(following.features)
            return following.logits

        first = read.skip(len(tokens) - 1).logits
        self._lazy, scores = greedy_chain(first, run, n, vocab_size, self._choose_best)
        if runner.tap is not None:
            for features in later:
                runner.tap.kept.append(features, 1)
        return self._lazy, scores

    def checkpoint(self) -> None:
        self._sync()
        check_committed(self._pending, "a checkpoint")
        self._drop_ahead()
        self._settle()
        self._keep_checkpoint()
        if self._runner.tap is not None:
            self._runner.tap.kept.checkpoint()

    def rewind(self, position: int) -> int:
        return self._rewind(position)

    def extend(self, n: int) -> int:
        self._sync()
        check_committed(self._pending, "an extension")
        self._drop_ahead()
        self._settle()
        n, caches, tap = min(n, self.capabilities.context_size), self._runner.caches, self._runner.tap
        if 0 < len(self.tokens) < n and caches.extend(n):
            self.bound = None
            more = n - len(self.tokens)
            width = self._runner.features.shape[-1] if tap is not None else 0
            self._append([NO_TOKEN] * more, mx.broadcast_to(mx.zeros(width), (more, width)))
            with map_errors():
                mx.eval(caches.state)
        return len(self.tokens)

    @property
    def can_cut(self) -> bool:
        return self._runner.caches.can_trim

    def save_state(self, limit: int) -> memoryview | None:
        self._sync()
        check_committed(self._pending, "it is saved")
        self._drop_ahead()
        self._settle()
        arrays = self._runner.caches.save() if self.tokens else None
        if arrays is None or sum(array.nbytes for array in arrays.values()) > limit:
            return None
        file = BytesIO()
        with map_errors():
            mx.save_safetensors(file, arrays)
        return file.getbuffer()

    def restore_state(self, tokens: Sequence[int], state: memoryview) -> bool:
        self._rewind(0)
        fresh, tap = self._open_runner(), self._runner.tap
        try:
            with map_errors():
                fresh.caches.load(mx.load(BytesIO(state), format="safetensors"))
        except (BackendError, KeyError, ValueError, RuntimeError):
            return False
        self._runner, fresh.tap, self._lag = fresh, tap, 0
        self.tokens = list(tokens)
        self._keep_checkpoint()
        if tap is not None:  # a head begins behind them
            tap.kept.skip_to(len(tokens))
        return True

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pending = self._ahead = self._lazy = None
            del self._runner
            self._checkpoints.clear()
            mx.clear_cache()

    def _reuse(self, tokens: Sequence[int]) -> int:
        """Keep what the caches hold of a prompt; returns how many tokens. A head needs the last one's hidden state."""
        kept = self._rewind(shared_prefix(self.tokens, tokens, len(tokens) - 1))
        tap = self._runner.tap
        return self._rewind(kept - 1) if tap is not None and kept and tap.kept.start == kept else kept

    def _rewind(self, position: int) -> int:
        """Drop all tokens from `position` on, or more if the caches cannot; returns how many are left."""
        self._sync()
        self._drop_pending()
        self._drop_ahead()
        if position >= len(self.tokens):
            return len(self.tokens)
        self.bound = None
        caches, held = self._runner.caches, len(self.tokens) - self._lag
        if position >= held:
            reached, self._lag = position, position - held
        elif caches.can_rewind(position):
            caches.keep(position)
            reached, self._lag = position, 0
        else:
            reached = self._restore_latest(position)
        del self.tokens[reached:]
        if self._runner.tap is not None:
            self._runner.tap.kept.rewind(reached)
        self._checkpoints.cut(reached)
        return reached

    def _choose_best(self, logits: Any) -> Any:
        return find_best(logits)

    def _start_chain(self, root: int, draft: Draft, before: Snapshot) -> Rows:
        """The rows of a root and a chain; the lagging tokens run first."""
        rows = chain_rows([*self._lagging_tokens, root], draft)
        # A continuation does not run the first layers of all rows, whose hidden states a tap may want.
        draft_session = self.bound if self._runner.tap is None else None
        continuation = draft_session.find_continuation(root, draft) if draft_session is not None else None
        return self._start(continuation or self._runner.run, rows, undo=before).skip(self._lag)

    def _start_ahead(self, scores: MlxScores, token: Any) -> None:
        """Start the next plain forward on the token [1] that `scores` have just decided on."""
        caches = self._runner.caches.take_snapshot()
        before = Snapshot(len(self.tokens) + 1, caches)  # the caches hold the root already
        self._ahead = Forward(self._start(self._runner.run, token[None], undo=before), before, after=scores)

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._runner.caches.restore(ahead.before.caches)

    def _drop_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._ahead = None  # its rows follow those that are dropped here
            self._runner.caches.restore(pending.before.caches)

    def _sync(self) -> None:
        """Append the tokens that a rollout has left on the device. Raises BackendError once the session is closed."""
        if self._is_closed:
            raise BackendError("the session is closed.")
        if self._lazy is not None:
            self.tokens += self._lazy.tokens[:-1].tolist()
            self._lazy = None

    @property
    def _lagging_tokens(self) -> list[int]:
        """The last tokens, which the caches do not hold."""
        return self.tokens[len(self.tokens) - self._lag :]

    def _take_snapshot(self, *, deep: bool = False) -> Snapshot:
        """The caches as they are; a deep one outlives any number of further tokens."""
        return Snapshot(len(self.tokens) - self._lag, self._runner.caches.take_snapshot(deep=deep))

    def _start(self, run: Callable[..., Any], *args: Any, undo: Snapshot | None = None) -> Rows:
        """The rows of a forward on the device. On BackendError and Cancelled the caches return to `undo`."""
        try:
            with map_errors():
                rows = Rows(run(*args), self._runner.features)
                mx.async_eval(rows.logits, rows.features, self._runner.caches.recurrent)
        except (BackendError, Cancelled):
            if undo is not None:
                self._runner.caches.restore(undo.caches)
            raise
        finally:
            self.bound = None
        return rows

    def _append(self, tokens: Sequence[int], features: Any) -> None:
        """The caches hold `tokens` as well; `features` [n, width] are theirs."""
        start = len(self.tokens)
        self.tokens += tokens
        if self._runner.tap is not None:
            self._runner.tap.kept.append(features, len(tokens))
        if len(self.tokens) // _CLEAR_PERIOD > start // _CLEAR_PERIOD:
            mx.clear_cache()  # buffers that the caches have outgrown

    def _run(self, tokens: Sequence[int]) -> None:
        """Run accepted tokens without scores, and wait. On BackendError and Cancelled the caches are as before."""
        before = self._runner.caches.take_snapshot()
        try:
            with map_errors(), self._runner.context.build(poll=self._poll):
                self._runner.run_chain(tokens)  # MLX computes only what is evaluated, so no scores
                mx.eval(self._runner.caches.state, self._runner.features)
        except (BackendError, Cancelled):
            self._runner.caches.restore(before)
            raise
        finally:
            self.bound = None
        mx.clear_cache()

    def _settle(self) -> None:
        """Run the tokens that the caches lack."""
        if self._lag:
            self._run(self._lagging_tokens)
            self._lag = 0

    def _restore_latest(self, position: int) -> int:
        """Restore the latest state up to `position`, else empty caches; returns how many tokens are left."""
        caches = self._runner.caches
        found = self._checkpoints.cut(position)
        while found is not None and not caches.can_restore(found[1]):
            found = self._checkpoints.cut(found[0] - 1)
        self._lag = 0
        if found is not None:
            caches.restore(found[1])
            return found[0]
        fresh = self._open_runner()
        self._runner, fresh.tap = fresh, self._runner.tap
        self._checkpoints.clear()
        return 0

    def _keep_checkpoint(self) -> None:
        snapshot = self._take_snapshot(deep=True)
        n_bytes = sum(each.nbytes for _, each in tree_flatten(snapshot.caches) if isinstance(each, mx.array))
        self._checkpoints.add(snapshot.position, snapshot.caches, n_bytes)
