"""Tokens of one sequence and the model's caches, which hold all of them but the last few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import Features, Unsupported
from edgespec.backends.mlx.caches import Caches, ForwardContext, KVQuantization, tree_positions
from edgespec.backends.mlx.hooks import LayerHooks
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.scores import MlxScores
from edgespec.core.protocols import CheckCancelled, Draft
from edgespec.core.tree import branches, depths, leaves, path_to
from edgespec.errors import BackendError, Cancelled

# Forwards of a session that are not committed yet, and the protocol of a draft that runs behind its target.


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
    before: Snapshot
    features: Any

    def features_of(self, path: Sequence[int]) -> Any:
        """[len(path) + 1, width] of the root and the nodes of `path`; None without a tap."""
        if self.features is None:
            return None
        if list(path) == list(range(len(path))):
            return self.features[: len(path) + 1]
        return self.features[mx.array([0, *(node + 1 for node in path)])]


@dataclass(frozen=True, slots=True)
class AheadForward:
    """A plain forward that was started on the first token of `scores` before the host had read that token."""

    scores: MlxScores
    rows: Rows
    before: Snapshot


class CacheTenant(Protocol):
    """A draft session that keeps provisional rows behind the target's in its caches."""

    def find_continuation(self, root: int, draft: Draft) -> Callable[[Any], Any] | None:
        """A function from the rows [1, n] of this chain to their scores [n, V], which uses what the draft has computed
        of them; None where it has computed nothing of them."""


# Hidden states of a session's forwards, for trained heads that draft from them.


class FeatureTap:
    """Reads the hidden states of some layers in forwards of one model; `kept` are those of a session's tokens.

    The inputs of `layers` are concatenated in this order (see formats.heads.HeadSpec); without layers it is the last
    hidden state after the final norm.
    """

    def __init__(self, hooks: LayerHooks, layers: Sequence[int]) -> None:
        """Raises Unsupported for layers that the model does not have."""
        count = len(hooks.layers)
        if any(not 0 <= layer <= count for layer in layers):
            raise Unsupported(
                f"the head reads layers {', '.join(map(str, layers))}, and the model has {count}.",
                hint="The head is for another model. Use --draft ngram, or another head.",
            )
        self.kept: Features[Any] = Features(mx.concatenate)
        self._hooks = hooks
        self._layers = tuple(layers)

    def run(self, model: Any, tokens: Any, entries: list[Any]) -> tuple[Any, Any]:
        """Logits [batch, n, V] of tokens [batch, n], and their features [batch, n, width].

        Raises Unsupported where the model's hidden states are not what a head reads.
        """
        with self._hooks.read_states() as states:
            logits = model(tokens, cache=entries)
        found = [states.inputs[layer] for layer in self._layers] or [states.final]
        if not all(isinstance(each, mx.array) and each.shape[:2] == tokens.shape for each in found):
            raise Unsupported(
                "the hidden states of this model cannot be read on MLX: its layers do not return a row for each token.",
                hint="Use --draft ngram, or a draft model.",
            )
        return logits, mx.concatenate(found, axis=-1)


# Forwards of a model over its caches: a chain, or a draft tree in one of three layouts.
#
# row       one batch row with a tree mask; rotary positions follow depth. The cheapest layout
# nodes     a batch row for each node over the same cache, for models whose positions do not pass through mx.fast.rope
# branches  a batch row for each leaf over copies of the caches, for recurrent states. Copies the whole prefix
#
# `probe` tries the layouts when a model is loaded, because the code of a model does not tell which ones it takes.


TreeLayout = Literal["row", "nodes", "branches"]


class ModelRunner:
    """A model with the caches of one sequence. Scores are lazy arrays [rows, V].

    Where there is a `tap`, `features` are those of the last forward, lazy as well: [rows, width].
    """

    def __init__(self, model: Any, quantization: KVQuantization | None = None) -> None:
        """Starts with empty caches, quantized by `quantization`. Raises BackendError for caches of unknown classes."""
        self.context = ForwardContext()
        self.caches = Caches(model, self.context, quantization)
        self.model = model
        self.tap: FeatureTap | None = None
        self.features: Any = None

    def run_chain(self, tokens: Sequence[int]) -> Any:
        """Run `tokens` one after another."""
        return self.run(mx.array([list(tokens)], mx.int32))

    def run(self, tokens: Any) -> Any:
        """Run the tokens of an array [1, n] one after another."""
        return self._run(tokens, self.caches.entries, lambda rows: rows[0])

    def run_tree(self, tree_layout: TreeLayout, position: int, root: int, draft: Draft) -> Any:
        """Run a root at `position` and its draft nodes. With 'branches' the caches do not change."""
        if tree_layout == "branches":
            return self._run_branches(root, draft)
        tokens = mx.array([root, *draft.tokens.tolist()], mx.int32)
        with self.context.build_tree(draft, position, is_batched=tree_layout == "nodes") as tree:
            if tree_layout == "nodes":
                return self._run(tokens[:, None], self.caches.entries, lambda rows: rows[:, 0])
            with tree_positions(tree.depth):
                return self.run(tokens[None])

    def _run_branches(self, root: int, draft: Draft) -> Any:
        ends, depth = leaves(draft), depths(draft)
        tokens = np.zeros((len(ends), int(depth.max()) + 1), np.int32)  # nothing attends to the padding
        tokens[:, 0] = root
        for branch, leaf in enumerate(ends):
            path = list(path_to(draft, leaf))
            tokens[branch, 1 : len(path) + 1] = draft.tokens[path]
        at = mx.array([0, *(each[0] for each in branches(draft))]), mx.array([0, *depth.tolist()])
        return self._run(mx.array(tokens), self.caches.branch(len(ends)), lambda rows: rows[at])

    def _run(self, tokens: Any, entries: list[Any], select: Callable[[Any], Any]) -> Any:
        """Scores [rows, V] of tokens [batch, n]; `select` picks the rows of arrays [batch, n, *]."""
        if self.tap is None:
            return select(self.model(tokens, cache=entries))
        logits, features = self.tap.run(self.model, tokens, entries)
        self.features = select(features)
        return select(logits)


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

    def commit_chain(self, start: int, n_rejected: int, before: Snapshot) -> None:
        """The tokens from `start` on were the first rows of a chain's forward; drop the `n_rejected` after them."""
        caches = self.runner.caches
        if n_rejected and not caches.can_trim:
            caches.restore(before.caches)
            self.lag = len(self.tokens) - before.position
            return
        self.lag = 0
        if n_rejected:
            caches.rewind(len(self.tokens))

    def commit_rows(self, start: int, rows: list[int]) -> None:
        """The tokens from `start` on were these `rows` of a tree's forward; drop the others."""
        self.lag = 0
        self.runner.caches.gather(start, rows)

    def commit_copies(self, start: int) -> None:
        """The forward of the tokens from `start` on ran on copies of the caches."""
        self.lag = len(self.tokens) - start

    def rewind(self, position: int) -> int:
        """Drop all tokens from `position` on, or more where the caches cannot; returns how many are left."""
        self.bound = None
        caches, held = self.runner.caches, len(self.tokens) - self.lag
        if position >= held:
            reached, self.lag = position, position - held
        elif caches.can_rewind(position):
            caches.rewind(position)
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
