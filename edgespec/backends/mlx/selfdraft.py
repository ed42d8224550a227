"""Self-drafts on MLX: some of the target's own layers, fewer bits, and some of its cached rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Unsupported
from edgespec.backends.mlx.caches import KeyValues
from edgespec.backends.mlx.hooks import LayerHooks, get_layers
from edgespec.backends.mlx.low_bit import make_low_bit
from edgespec.backends.mlx.runner import ModelRunner
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.shared_kv import SharedKVSession
from edgespec.core.arrays import Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT, Draft, Session
from edgespec.errors import EdgespecError, reason_of
from edgespec.progress import report_loaded
from edgespec.text.tokenizer import Tokenizer

_PROMPT, _DRAFTED = 6, 3  # tokens of the probe
_ADVICE = "Use --draft ngram, or a draft model."


class MlxSelfDraft(AttachedDraft):
    """A model as its own draft. Its sessions use their target's caches.

    model                 the target's, or a copy of it whose weights have fewer bits
    hooks                 of the layers of both
    layers                those that run, ascending
    sparse                (sink, window): tokens of context seen at its start and its end; None for all
    has_windows           whether any of its caches drops rows behind a window
    continues_from_layer  whether the target continues drafted rows after `layers`, instead of running those again: they
                          are the first ones and run unchanged
    """

    def __init__(
        self,
        runner: ModelRunner,
        hooks: LayerHooks,
        tokenizer: Tokenizer,
        method: SelfDraftSpec,
        open_session: Callable[[], MlxSession],
    ) -> None:
        """`runner` is any of the model's. Raises Unsupported, InvalidRequest, BackendError, Cancelled."""
        count = len(hooks.layers)
        layers = method.layers(count)
        self.tokenizer, self.name, self.extra_bytes = tokenizer, str(method), 0
        self.hooks, self.layers, self.sparse = hooks, layers, method.sparse
        self._target = self.model = runner.model
        if method.bits is not None:
            self.model, self.extra_bytes = make_low_bit(runner.model, layers, method.bits)
        self.has_windows = any(entry.window is not None for entry in runner.caches.entries)
        is_exit = len(layers) < count and layers == tuple(range(len(layers)))
        self.continues_from_layer = is_exit and method.bits is None and method.sparse is None
        _probe(self, open_session, tokenizer.vocab_size)
        report_loaded(1.0)

    def open_session(self, target: Session) -> SharedKVSession:
        """Raises ValueError for a session of another model."""
        target = getattr(target, "inner", target)
        if not isinstance(target, MlxSession) or target.model is not self._target:
            raise ValueError("the target is a session of another model")
        return SharedKVSession(target, self)

    def close(self) -> None:
        self.model = self._target
        mx.clear_cache()


def check_layers(runner: ModelRunner) -> None:
    """Raises Unsupported if the model's layers or caches do not allow a self-draft."""
    layers, entries = get_layers(runner.model), runner.caches.entries
    for is_so, reason in (
        (bool(runner.caches.recurrent), "its layers have recurrent states, which a draft cannot share"),
        (not all(isinstance(each, KeyValues) for each in entries), "it has caches that a draft cannot share"),
        (
            not len(layers) == len(entries) == len({id(layer) for layer in layers}),
            "it does not have one cache for each layer",
        ),
    ):
        if is_so:
            raise Unsupported(f"this model cannot draft for itself on MLX: {reason}.", hint=_ADVICE)


def _probe(network: MlxSelfDraft, open_session: Callable[[], MlxSession], vocab_size: int) -> None:
    """Drafts and verifies a few tokens, to test whether a model's code works in this way. It does not judge the drafts.

    Raises Unsupported if the model fails, or if the scores of its target change. Sets `continues_from_layer` to
    False if only that fails.
    """
    try:
        reason = _find_failure(network, open_session, vocab_size)
    except EdgespecError as error:
        reason = f"it fails ({reason_of(error)})"
    if reason is not None:
        raise Unsupported(f"this model cannot draft for itself in this way on MLX: {reason}.", hint=_ADVICE)


def _find_failure(network: MlxSelfDraft, open_session: Callable[[], MlxSession], vocab_size: int) -> str | None:
    tokens: list[int] = ((np.arange(_PROMPT + 1 + _DRAFTED) * 7919 + 11) % vocab_size).tolist()
    root, drafted = tokens[_PROMPT], tokens[_PROMPT + 1 :]
    plain, stepwise, target = (open_session() for _ in range(3))
    for session in (plain, stepwise, target):
        read_prompt(session, tokens[:_PROMPT])
    expected = _score_chain(plain, root, drafted)
    noise = np.abs(expected - np.stack(_score_singly(stepwise, root, drafted))).max()
    draft, rows_before = SharedKVSession(target, network), network.hooks.layer_rows
    single = _score_singly(draft, root, drafted)
    if network.hooks.layer_rows - rows_before != len(network.layers) * len(single):  # or they run more rows than these
        return "its layers do not run one after another"
    draft.rewind(0)
    together = _score_chain(draft, root, drafted)
    # Comparisons with NaN are false, which refuses such scores too.
    if not np.abs(together - np.stack(single)).max() < 0.25 * expected.std():
        return "the draft's scores of several tokens at once are not those of one at a time"
    draft.commit(range(len(drafted)))
    can_continue, is_same = network.continues_from_layer, False
    try:
        difference = np.abs(_score_chain(target, root, drafted) - expected).max()
        is_same = bool(difference <= max(4 * noise, 0.02 * expected.std()))
    except EdgespecError:
        if not can_continue:
            raise
    network.continues_from_layer = can_continue and is_same
    return None if is_same or can_continue else "the target's scores have changed"


def _score_singly(session: Session, root: int, drafted: Sequence[int]) -> list[Logits]:
    """[n] rows [V] after the root and each of `drafted`, which are committed one at a time."""
    rows = []
    for token in (root, *drafted):
        rows.append(session.forward(token, NO_DRAFT).logits(0))
        session.commit(())
    return rows


def _score_chain(session: Session, root: int, drafted: Sequence[int]) -> Logits:
    """[n, V] of the forward of a chain."""
    scores = session.forward(root, Draft.chain(drafted))
    return np.stack([scores.logits(i) for i in range(len(drafted) + 1)])
