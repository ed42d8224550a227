"""Self-drafts on MLX: the target's own layers, weights and caches, of each as much as the method asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import SelfDraftModel, SelfDraftSpec, Unsupported
from edgespec.backends.mlx.hooks import Hooks
from edgespec.backends.mlx.keyvalues import KeyValues
from edgespec.backends.mlx.lowbit import LowBits, linears_of
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.shared_kv import DraftNetwork, SharedKVSession
from edgespec.backends.mlx.tree_layouts import ModelRunner
from edgespec.core.arrays import Logits
from edgespec.core.protocols import NO_DRAFT, CheckCancelled, Draft, Session
from edgespec.errors import EdgespecError, reason_of
from edgespec.text.tokenizer import Tokenizer

_PROMPT, _DRAFTED = 6, 3  # tokens that a draft is tried out on
_ADVICE = "Use --draft ngram, or a draft model."


class MlxSelfDraft(SelfDraftModel):
    """A model as its own draft. Its sessions work on those of the model, and no two low-bit ones exist at a time."""

    def __init__(
        self,
        forwards: ModelRunner,
        hooks: Hooks,
        tokenizer: Tokenizer,
        method: SelfDraftSpec,
        open_session: Callable[[], MlxSession],
        progress: Callable[[float], None],
        check: CheckCancelled,
    ) -> None:
        """`forwards` are any of the model's. Tries out whether it drafts so.

        Raises Unsupported, InvalidRequest, BackendError, Cancelled.
        """
        count = len(hooks.layers)
        layers = method.skip.layers(count) if method.skip is not None else tuple(range(count))
        self.tokenizer = tokenizer
        self.name = str(method)
        is_exit = len(layers) < count and layers == tuple(range(len(layers)))
        self._way = DraftNetwork(
            forwards.model,
            hooks,
            layers,
            method.bits is not None,
            method.sparse,
            any(entry.has_window for entry in forwards.caches.entries),
            continues_from_layer=is_exit and method.bits is None and method.sparse is None,
        )
        self._low = LowBits(hooks)
        trial = _Trial(self._way, open_session, tokenizer.vocab_size, check)
        try:
            if method.bits is not None:
                linears = linears_of(forwards.model, [layer for i, layer in enumerate(hooks.layers) if i not in layers])
                if method.planes:
                    self._low.add_planes(linears, progress, check)
                else:
                    self._low.add_copies(linears, method.bits, progress, check)
            trial.run()
        except BaseException:
            self._low.close()
            raise
        self.extra_bytes = self._low.extra_bytes
        progress(1.0)

    @property
    def continues_from_layer(self) -> bool:
        """Whether the target goes on from the layers where drafted rows have got to, instead of running them again."""
        return self._way.continues_from_layer

    def open_session(self, target: Session, check: CheckCancelled) -> SharedKVSession:
        """Raises ValueError for a session of another model."""
        if not isinstance(target, MlxSession) or target.network is not self._way.network:
            raise ValueError("a model drafts for itself beside its own sessions only")
        return SharedKVSession(target, self._way, check)

    def close(self) -> None:
        self._low.close()
        mx.clear_cache()


def hooks_for(forwards: ModelRunner) -> Hooks:
    """What lets layers be left out. Raises Unsupported for models whose layers or caches do not allow it."""
    layers, entries = layers_of(forwards.model), forwards.caches.entries
    if forwards.caches.recurrent:
        reason = "its layers keep recurrent states, which cannot be shared with a draft"
    elif not all(isinstance(entry, KeyValues) for entry in entries):
        reason = "its caches have parts that a draft cannot share"
    elif not len(layers) == len(entries) == len({id(layer) for layer in layers}):
        reason = "its layers do not have a cache each"
    else:
        return Hooks(layers)
    raise Unsupported(f"this model cannot draft for itself on MLX: {reason}.", hint=_ADVICE)


def layers_of(network: Any) -> Sequence[Any]:
    """The layers of a model, in order."""
    return getattr(network, "layers", None) or ()


class _Trial:
    """A few tokens drafted by a model and verified, to see whether its code takes what is done to it.

    Made before anything is done to it. It is not asked whether the drafts are any good.
    """

    def __init__(
        self, way: DraftNetwork, open_session: Callable[[], MlxSession], vocab_size: int, check: CheckCancelled
    ) -> None:
        self._way = way
        self._open_session = open_session
        self._vocab_size = vocab_size
        self._check = check
        self._tokens: list[int] = ((np.arange(_PROMPT + 1 + _DRAFTED) * 7919 + 11) % vocab_size).tolist()
        self._expected, self._noise = self._plain()

    def run(self) -> None:
        """Raises Unsupported where the model fails or computes something else.

        Sets `continues_from_layer` to False where only that fails.
        """
        try:
            reason = self._failure()
        except EdgespecError as error:
            reason = f"it fails ({reason_of(error)})"
        if reason is not None:
            raise Unsupported(f"this model cannot draft for itself in this way on MLX: {reason}.", hint=_ADVICE)

    def _failure(self) -> str | None:
        way, hooks, spread = self._way, self._way.hooks, float(self._expected.std())
        target = self._begun()
        draft = SharedKVSession(target, way, self._check)
        _, root, drafted = self._parts
        before = hooks.layer_rows
        singly = [_rows(draft, token) for token in (root, *drafted)]
        if hooks.layer_rows - before != len(way.layers) * len(singly):  # or they take more than a hidden row each
            return "its layers do not run one after another"
        draft.rewind(0)
        together = draft.forward(root, Draft.chain(drafted))
        # Comparisons with NaN are false: such scores are refused too.
        if not all(np.abs(together.logits(i) - row).max() < 0.25 * spread for i, row in enumerate(singly)):
            return "a draft's scores of several tokens at once are not those of one at a time"
        draft.commit(range(len(drafted)))
        resumed = way.continues_from_layer
        try:
            apart = np.abs(_chain(target, root, drafted) - self._expected).max()
        except EdgespecError:
            if not resumed:
                raise
            way.continues_from_layer = False
            return None
        limit = max(4 * self._noise, 0.02 * spread)
        if resumed:
            way.continues_from_layer = bool(apart <= limit)
        elif not apart <= max(limit, 0.25 * spread if way.is_low else 0.0):
            return "the target's scores are no longer what they were"
        return None

    def _plain(self) -> tuple[Logits, float]:
        """[n, V] the target's scores of the root and the drafted tokens as a chain, and what rounding makes of them."""
        _, root, drafted = self._parts
        chain = _chain(self._begun(), root, drafted)
        session = self._begun()
        singly = np.stack([_rows(session, token) for token in (root, *drafted)])
        return chain, float(np.abs(chain - singly).max())

    @property
    def _parts(self) -> tuple[list[int], int, list[int]]:
        tokens = self._tokens
        return tokens[:_PROMPT], tokens[_PROMPT], tokens[_PROMPT + 1 :]

    def _begun(self) -> MlxSession:
        """A session that holds the prompt."""
        session = self._open_session()
        for _ in session.prefill(self._parts[0]):
            self._check()
        return session


def _rows(session: Session, token: int) -> Logits:
    """[V] after one token, which stays."""
    scores = session.forward(token, NO_DRAFT)
    session.commit(())
    return scores.logits(0)


def _chain(session: Session, root: int, drafted: Sequence[int]) -> Logits:
    """[n, V] of a chain's forward."""
    scores = session.forward(root, Draft.chain(drafted))
    return np.stack([scores.logits(i) for i in range(len(drafted) + 1)])
