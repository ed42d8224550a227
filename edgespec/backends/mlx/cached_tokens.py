"""Tokens of one sequence and the model's caches, which hold all of them but the last few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.pending import CacheTenant, Rows, Snapshot
from edgespec.backends.mlx.taps import FeatureTap
from edgespec.backends.mlx.tree_layouts import ModelRunner
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, Cancelled

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
        self.attached: CacheTenant | None = None  # until any forward or trim
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

    def drop_tap(self) -> None:
        """Keep no features any more."""
        self.tap = self.runner.tap = None

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
            self.attached = None
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
            self.attached = None
        mx.clear_cache()

    def settle(self) -> None:
        """Run the tokens that the caches lack."""
        if self.lag:
            self.run(self.lagging_tokens)
            self.lag = 0

    def commit_chain(self, start: int, n_rejected: int, before: Snapshot) -> None:
        """The tokens from `start` on were the first rows of a chain's forward; drop the `n_rejected` after them."""
        caches = self.runner.caches
        if n_rejected and not caches.can_trim:
            caches.restore(before.caches)
            self.lag = len(self.tokens) - before.position
            return
        self.lag = 0
        if n_rejected:
            caches.trim_to(len(self.tokens))

    def commit_rows(self, start: int, rows: list[int]) -> None:
        """The tokens from `start` on were these `rows` of a tree's forward; drop the others."""
        self.lag = 0
        self.runner.caches.gather(start, rows)

    def commit_copies(self, start: int) -> None:
        """The forward of the tokens from `start` on ran on copies of the caches."""
        self.lag = len(self.tokens) - start

    def trim_to(self, position: int) -> int:
        """Drop all tokens from `position` on, or more where the caches cannot; returns how many are left."""
        self.attached = None
        caches, held = self.runner.caches, len(self.tokens) - self.lag
        if position >= held:
            reached, self.lag = position, position - held
        elif caches.can_trim_to(position):
            caches.trim_to(position)
            reached, self.lag = position, 0
        else:
            reached = self._restore_latest(position)
        del self.tokens[reached:]
        if self.tap is not None:
            self.tap.kept.truncate(reached)
        self.snapshots = {name: each for name, each in self.snapshots.items() if each.position <= reached}
        return reached

    def extend(self, n: int) -> int:
        """Hold copies of the present rows as tokens up to `n`; returns how many are held. Raises BackendError."""
        self.settle()
        if 0 < len(self.tokens) < n and self.runner.caches.extend(n):
            self.attached = None
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
