"""A session that drafts for another of the same model, over the same caches or over extracts of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from edgespec.backends.mlx.caches import SLACK, KeyValues
from edgespec.backends.mlx.hooks import LayerPass
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.scores import DeviceDraft, MlxScores, chain_rows, greedy_chain
from edgespec.backends.mlx.session import MAX_ROWS, MlxSession
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
from edgespec.core.protocols import Draft, PrefillProgress, Session
from edgespec.core.scores import HostScores, Scores
from edgespec.errors import BackendError, ContextOverflow

if TYPE_CHECKING:
    from edgespec.backends.mlx.selfdraft import MlxSelfDraft


class SharedKVSession:
    """A Session for drafts, which are chains. Holds the tokens of its target, and a tail of its own.

    The tail is dropped when the target computes or drops anything. In caches with windows it is limited to SLACK
    tokens, because a longer one may push out rows that the target needs.
    """

    peers = SOLO

    def __init__(self, target: MlxSession, network: MlxSelfDraft) -> None:
        self._target = target
        self._network = network
        self.capabilities = replace(target.capabilities, tree=False, shares_kv=True)
        self._is_closed = False
        self._tail: list[int] = []
        self._lazy: DeviceDraft | None = None  # of the last rollout; all but its last token follow the tail
        self._pending: tuple[int, Draft] | None = None
        self._hidden: list[Any] = []  # [1, rows, H] each, of the rows of the tail
        self._caches: list[KeyValues] = []  # in use for the tail

    @property
    def position(self) -> int:
        return self._target.position + (self._tail_length if self._target.bound is self else 0)

    @property
    def draft_limit(self) -> int:
        return max(0, min(self._space - (self.position - self._target.position), MAX_ROWS) - 1)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """Run what is not held of `tokens`, and score the last row that runs.

        Raises ContextOverflow, Cancelled, BackendError.
        """
        self._sync()
        self._pending = None
        check_prompt(tokens, self.capabilities)
        base = self._target.position
        self._read_lazy()
        held = [*self._target.tokens, *self._tail]
        agreed = shared_prefix(held, tokens, len(tokens))
        agreed = max(min(base, len(tokens)), min(agreed, len(tokens) - 1))
        self.rewind(agreed)
        scores: Scores = HostScores(())
        if missing := tokens[agreed:]:
            self._require_space(len(missing))
            scores = MlxScores(self._run(mx.array([list(missing)], mx.int32), agreed - base)[-1:])
            self._tail += missing
        yield PrefillProgress(len(tokens), len(tokens))
        return scores

    def adopt(self, other: Session, n: int) -> bool:
        return False

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._prepare()
        check_forward(self, root, draft, is_on_device=isinstance(draft, DeviceDraft))
        logits = self._run(chain_rows((root,), draft), len(self._tail))
        self._pending = root, draft
        return MlxScores(logits, draft=draft)

    def commit(self, path: Sequence[int]) -> None:
        self._tail += kept_tokens(self._pending, path)
        self._pending = None

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        self._prepare()
        check_ids(tokens, self.capabilities.vocab_size)
        self._require_space(len(tokens) + n - 1)
        first = self._run(mx.array([list(tokens)], mx.int32), len(self._tail))[-1:]
        self._tail += tokens
        at = count(len(self._tail))
        self._lazy, scores = greedy_chain(first, lambda token: self._run(token[None], next(at)), n, vocab_size)
        return self._lazy, scores

    def checkpoint(self) -> None:
        """Nothing to do: the tail can be trimmed anywhere."""

    def rewind(self, position: int) -> int:
        self._sync()
        self._pending = None
        kept = max(0, position - self._target.position)
        if kept < self._tail_length:
            if kept:
                self._read_lazy()
            self._lazy = None
            del self._tail[kept:]
        return self.position

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._drop_tail()
            if self._target.bound is self:
                self._target.bound = None

    def find_continuation(self, root: int, draft: Draft) -> Callable[[Any], Any] | None:
        """A function from this chain [1, n] to its scores [n, V] that goes on from the draft; None without one."""
        if not self._network.continues_from_layer:
            return None
        if draft is self._lazy and self._tail == [root]:
            agreed = len(draft)  # all but its last token, after the root
        else:
            self._read_lazy()
            known_tokens = [root, *draft.tokens.tolist()]
            agreed = shared_prefix(self._tail, known_tokens, len(known_tokens))
        return partial(self._continue, self._hidden_rows(agreed)) if agreed else None

    def _continue(self, hidden: Any, rows: Any) -> Any:
        """Scores [n, V] of `rows` [1, n], given `hidden` [1, m, H], the draft's last output for the first m of them.

        The caches of the draft's layers hold those m rows behind the target's position. Leaves all caches at the end of
        the n rows.
        """
        network, base, done = self._network, self._target.position, hidden.shape[1]
        if done < rows.shape[1]:
            self._rewind_caches(base + done)
            layer_pass = LayerPass(network.layers)
            with network.hooks.build(layer_pass):
                network.model(rows[:, done:], cache=self._caches)  # MLX computes only what is evaluated: these layers
            hidden = mx.concatenate([hidden, layer_pass.output], axis=1)
            self._rewind_caches(base)
        others = range(len(network.layers), len(network.hooks.layers))
        with network.hooks.build(LayerPass(others, input=hidden)):
            logits = network.model(rows, cache=self._caches)[0]
        self._rewind_caches(base + rows.shape[1])
        return logits

    def _run(self, tokens: Any, at: int) -> Any:
        """Scores [n, V] of tokens [1, n] that start `at` rows behind the target's; handed to the device.

        Leaves the caches at the target's position, even if it raises BackendError or Cancelled.
        """
        check_cancelled()
        network, base = self._network, self._target.position
        runner = self._target.bind(self)
        if not self._caches:
            entries: list[KeyValues] = runner.caches.entries
            self._caches = [entry.extract(*network.sparse) for entry in entries] if network.sparse else entries
        layer_pass = LayerPass(network.layers)
        try:
            with map_errors(), network.hooks.build(layer_pass):
                self._rewind_caches(base + at)  # also those of skipped layers: models make masks from any cache
                logits = network.model(tokens, cache=self._caches)[0]
                mx.async_eval(logits)
        finally:
            self._rewind_caches(base)
        if network.continues_from_layer:
            if sum(hidden.shape[1] for hidden in self._hidden) > at:  # some rows were rewound
                self._hidden = [self._hidden_rows(at)] if at else []
            self._hidden.append(layer_pass.output)
        return logits

    def _hidden_rows(self, n: int) -> Any:
        """[1, n, H] the output of the draft's layers for the first rows of the tail."""
        return mx.concatenate(self._hidden, axis=1)[:, :n]

    def _rewind_caches(self, position: int) -> None:
        for each in self._caches:
            each.rewind(position)

    @property
    def _tail_length(self) -> int:
        return len(self._tail) + (len(self._lazy) - 1 if self._lazy is not None else 0)

    def _read_lazy(self) -> None:
        """Append the tokens that a rollout has left on the device."""
        lazy, self._lazy = self._lazy, None
        if lazy is not None:
            self._tail += lazy.tokens[:-1].tolist()

    def _prepare(self) -> None:
        self._sync()
        self._read_lazy()
        check_committed(self._pending)

    def _sync(self) -> None:
        """Drop the tail if the target has changed. Raises BackendError once the session is closed."""
        if self._is_closed:
            raise BackendError("the session is closed.")
        if self._target.bound is not self:
            self._drop_tail()

    def _drop_tail(self) -> None:
        self._lazy = self._pending = None
        self._tail, self._hidden, self._caches = [], [], []

    @property
    def _space(self) -> int:
        """Rows that the tail may have."""
        left = self.capabilities.context_size - self._target.position
        return min(left, SLACK) if self._network.has_windows else left

    def _require_space(self, n: int) -> None:
        if len(self._tail) + n > self._space:
            raise ContextOverflow(f"{n} drafted tokens do not fit.", hint="Report this as a bug.")
