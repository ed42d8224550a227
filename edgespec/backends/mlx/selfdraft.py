"""Self-drafts on MLX: some of the target's own layers, fewer bits, and some of its cached rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Unsupported
from edgespec.backends.mlx.caches import SLACK, KeyValues
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.runner import LayerHooks, LayerPass, ModelRunner, derive_class, get_layers
from edgespec.backends.mlx.scores import DeviceDraft, MlxScores, chain_rows, greedy_chain
from edgespec.backends.mlx.session import MAX_ROWS, MlxSession
from edgespec.backends.sequence import check_committed, check_ids, check_prompt, kept_tokens, shared_prefix
from edgespec.core.protocols import (
    NO_DRAFT,
    SOLO,
    CheckCancelled,
    Draft,
    PrefillProgress,
    Session,
    Yield,
)
from edgespec.core.sampling import Logits
from edgespec.core.scores import HostScores, Scores
from edgespec.core.tree import check_draft
from edgespec.core.verify import read_prompt
from edgespec.errors import BackendError, ContextOverflow, EdgespecError, RollbackError, reason_of
from edgespec.text.tokenizer import Tokenizer

# A session that drafts for another of the same model, over the same caches or over extracts of them.


@dataclass(slots=True)
class DraftNetwork:
    """How a model runs when it drafts for itself.

    layers                those that run, ascending
    is_low_bit            whether they read their weights with fewer bits
    sparse                (sink, window): tokens of context seen at its start and its end; None for all
    has_windows           whether any of its caches drops rows behind a window
    continues_from_layer  whether `layers` are the first ones and run unchanged, so that the target can continue after
                          them
    """

    model: Any
    hooks: LayerHooks
    layers: Sequence[int]
    is_low_bit: bool
    sparse: tuple[int, int] | None
    has_windows: bool
    continues_from_layer: bool


class SharedKVSession:
    """A Session for drafts, which are chains. Holds the tokens of its target, and a tail of its own.

    The tail is dropped when the target computes or drops anything. In caches with windows it is limited to SLACK
    tokens, because a longer one may push out rows that the target needs.
    """

    peers = SOLO

    def __init__(self, target: MlxSession, network: DraftNetwork, check: CheckCancelled) -> None:
        self._target = target
        self._network = network
        self._check = check
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
        return max(0, min(self.capabilities.context_size - self.position - 1, MAX_ROWS - 1))

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """Run the part of `tokens` that is not held. The scores have no row where the target holds all of them.

        Raises RollbackError where the target holds another text, ContextOverflow, Cancelled, BackendError.
        """
        self._sync()
        self._pending = None
        check_prompt(tokens, self.capabilities)
        base = self._target.position
        self._read_lazy()
        held = [*self._target.tokens, *self._tail]
        agreed = shared_prefix(held, tokens, len(tokens))
        if agreed < min(base, len(tokens)):
            raise RollbackError("the draft and its target hold different texts.", hint="Report this as a bug.")
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
        check_ids((root,), self.capabilities.vocab_size)
        if not draft.is_chain:
            raise ValueError("this session takes chains only")
        if len(draft) and not isinstance(draft, DeviceDraft):
            check_draft(draft, self.capabilities.vocab_size)
        self._require_space(len(draft) + 1)
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
            self._target.unbind(self)

    def find_continuation(self, root: int, draft: Draft) -> Callable[[Any], Any] | None:
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
            with network.hooks.run_pass(layer_pass):
                network.model(rows[:, done:], cache=self._caches)  # MLX computes only what is evaluated: these layers
            hidden = mx.concatenate([hidden, layer_pass.output], axis=1)
            self._rewind_caches(base)
        others = range(len(network.layers), len(network.hooks.layers))
        with network.hooks.run_pass(LayerPass(others, input=hidden)):
            logits = network.model(rows, cache=self._caches)[0]
        self._rewind_caches(base + rows.shape[1])
        return logits

    def _run(self, tokens: Any, at: int) -> Any:
        """Scores [n, V] of tokens [1, n] that start `at` rows behind the target's; handed to the device.

        Leaves the caches at the target's position, also where it raises BackendError or Cancelled.
        """
        self._check()
        network, base = self._network, self._target.position
        runner = self._target.bind(self)
        if not self._caches:
            entries: list[KeyValues] = runner.caches.entries
            self._caches = [entry.extract(*network.sparse) for entry in entries] if network.sparse else entries
        layer_pass = LayerPass(network.layers, network.is_low_bit)
        try:
            with map_errors(), network.hooks.run_pass(layer_pass):
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
            raise BackendError("the session is closed.", hint="Open another.")
        if self._target.bound is not self:
            self._drop_tail()

    def _drop_tail(self) -> None:
        self._lazy = self._pending = None
        self._tail, self._hidden, self._caches = [], [], []

    def _require_space(self, n: int) -> None:
        end = len(self._tail) + n
        limit = self.capabilities.context_size - self._target.position
        if end > (min(limit, SLACK) if self._network.has_windows else limit):
            raise ContextOverflow(f"{n} drafted tokens do not fit.", hint="Report this as a bug.")


# Linear layers that also have a copy of their weights with fewer bits, which drafts read.


_KEY = "_edgespec_reading"
_FLOAT, _QUANTIZED = (nn.Linear, SwitchLinear), (nn.QuantizedLinear, QuantizedSwitchLinear)
_GROUPS = (64, 32, 128)  # elements that can share a scale, the preferred number first
_FLOAT_BITS = 4  # default for a copy of floating-point weights
_MIN_BITS = 2


class LowBitWeights:
    """Adds low-bit copies to the linear layers of a model, experts included, until `close`."""

    def __init__(self, hooks: LayerHooks) -> None:
        self.extra_bytes = 0
        self._hooks = hooks
        self._changed: list[tuple[Any, Any]] = []  # layers and their own classes

    def add_copies(
        self, linears: Sequence[Any], bits: int, progress: Callable[[float], None], check: CheckCancelled
    ) -> None:
        """Add copies of `bits` a weight (0: half of its own) to the layers that have more.

        Raises Unsupported, BackendError, Cancelled, and then leaves the model unchanged.
        """
        chosen = [(linear, count) for linear in linears if (count := _choose_bits(linear, bits))]
        if not chosen:
            raise Unsupported(
                "the model's weights have no more bits than the draft's.", hint="Use fewer bits, or layerskip."
            )
        try:
            for done, (linear, count) in enumerate(chosen):
                check()
                progress(done / len(chosen))
                with map_errors():
                    low = _requantize(linear, count)
                self.extra_bytes += low.weight.nbytes + low.scales.nbytes + low.biases.nbytes
                kind: type = type(linear)
                self._changed.append((linear, kind))
                linear.__dict__[_KEY] = self._hooks, low
                linear.__class__ = _low_bit_class(kind)
        except BaseException:
            self.close()
            raise
        mx.clear_cache()

    def close(self) -> None:
        """Drop the copies and give the layers their own classes back."""
        while self._changed:
            linear, kind = self._changed.pop()
            del linear.__dict__[_KEY]
            linear.__class__ = kind
        self.extra_bytes = 0


def find_linears(model: Any, skipped: Sequence[Any]) -> list[Any]:
    """The linear layers of a model outside of the layers `skipped`, without embeddings.

    Raises BackendError where the model has a low-bit draft already.
    """
    if any(_KEY in module.__dict__ for _, module in model.named_modules()):
        raise BackendError("the model has a low-bit draft already.", hint="Close it before you load another.")
    skipped_modules = {id(module) for layer in skipped for _, module in layer.named_modules()}
    found = {id(m): m for _, m in model.named_modules() if type(m) in (*_FLOAT, *_QUANTIZED)}
    return [module for key, module in found.items() if key not in skipped_modules]


@cache
def _low_bit_class(kind: type) -> Any:
    plain = kind.__call__

    def call(linear: Any, *args: Any, **kwargs: Any) -> Any:
        hooks, low = linear.__dict__[_KEY]
        if hooks.current is None or not hooks.current.is_low_bit:
            return plain(linear, *args, **kwargs)
        return low(*args, **kwargs)

    return derive_class(kind, call)


def _choose_bits(linear: Any, bits: int) -> int:
    """Bits of a layer's low-bit copy; 0 where there can be none."""
    if not _group_size(linear) or getattr(linear, "global_scale", None) is not None:
        return 0
    if not isinstance(linear, _QUANTIZED):
        return bits or _FLOAT_BITS
    n_bits = bits or linear.bits // 2
    return n_bits if _MIN_BITS <= n_bits < linear.bits else 0


def _group_size(linear: Any) -> int:
    """Elements that share a scale in a copy, as in the layer if possible; 0 where no group size fits its rows."""
    width = linear.weight.shape[-1]
    if isinstance(linear, _QUANTIZED):
        if linear.group_size in _GROUPS:
            return int(linear.group_size)
        width = width * 32 // linear.bits
    return next((group for group in _GROUPS if width % group == 0), 0)


def _requantize(linear: Any, bits: int) -> Any:
    """A module with the same matrices and biases, in `bits` a weight."""
    plain = linear
    if isinstance(linear, _QUANTIZED):
        plain = SwitchLinear(1, 1, 1, False) if isinstance(linear, QuantizedSwitchLinear) else nn.Linear(1, 1, False)
        settings = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
        plain.weight = mx.dequantize(linear.weight, linear.scales, linear.get("biases"), **settings)
        if "bias" in linear:
            plain.bias = linear.bias
    low = plain.to_quantized(_group_size(linear), bits)
    mx.eval(low.parameters())
    return low


_PROMPT, _DRAFTED = 6, 3  # tokens of the probe
_ADVICE = "Use --draft ngram, or a draft model."


class MlxSelfDraft(AttachedDraft):
    """A model as its own draft. Its sessions use their target's caches. Only one low-bit draft exists at a time."""

    def __init__(
        self,
        runner: ModelRunner,
        hooks: LayerHooks,
        tokenizer: Tokenizer,
        method: SelfDraftSpec,
        open_session: Callable[[], MlxSession],
        progress: Callable[[float], None],
        check: CheckCancelled,
    ) -> None:
        """`runner` is any of the model's. Probes the draft on a few tokens.

        Raises Unsupported, InvalidRequest, BackendError, Cancelled.
        """
        count = len(hooks.layers)
        layers = method.skip.layers(count) if method.skip is not None else tuple(range(count))
        self.tokenizer = tokenizer
        self.name = str(method)
        is_exit = len(layers) < count and layers == tuple(range(len(layers)))
        self._network = DraftNetwork(
            runner.model,
            hooks,
            layers,
            method.bits is not None,
            method.sparse,
            any(entry.has_window for entry in runner.caches.entries),
            continues_from_layer=is_exit and method.bits is None and method.sparse is None,
        )
        self._low = LowBitWeights(hooks)
        probe = _SelfDraftProbe(self._network, open_session, tokenizer.vocab_size, check)
        try:
            if method.bits is not None:
                linears = find_linears(runner.model, [layer for i, layer in enumerate(hooks.layers) if i not in layers])
                self._low.add_copies(linears, method.bits, progress, check)
            probe.run()
        except BaseException:
            self._low.close()
            raise
        self.extra_bytes = self._low.extra_bytes
        progress(1.0)

    @property
    def continues_from_layer(self) -> bool:
        """Whether the target continues drafted rows after the draft's layers, instead of running those layers again."""
        return self._network.continues_from_layer

    def open_session(self, target: Session, check: CheckCancelled) -> SharedKVSession:
        """Raises ValueError for a session of another model."""
        if not isinstance(target, MlxSession) or target.model is not self._network.model:
            raise ValueError("the target is a session of another model")
        return SharedKVSession(target, self._network, check)

    def close(self) -> None:
        self._low.close()
        mx.clear_cache()


def check_layers(runner: ModelRunner) -> None:
    """Whether the model's layers can be skipped. Raises Unsupported where its layers or caches do not allow it."""
    layers, entries = get_layers(runner.model), runner.caches.entries
    if runner.caches.recurrent:
        reason = "its layers have recurrent states, which a draft cannot share"
    elif not all(isinstance(entry, KeyValues) for entry in entries):
        reason = "it has caches that a draft cannot share"
    elif not len(layers) == len(entries) == len({id(layer) for layer in layers}):
        reason = "it does not have one cache for each layer"
    else:
        return
    raise Unsupported(f"this model cannot draft for itself on MLX: {reason}.", hint=_ADVICE)


class _SelfDraftProbe:
    """Drafts and verifies a few tokens, to test whether a model's code works with hooks and low-bit weights.

    Create it before the weights change: it records the scores of the plain model. It does not judge the drafts.
    """

    def __init__(
        self, network: DraftNetwork, open_session: Callable[[], MlxSession], vocab_size: int, check: CheckCancelled
    ) -> None:
        self._network = network
        self._open_session = open_session
        self._check = check
        tokens: list[int] = ((np.arange(_PROMPT + 1 + _DRAFTED) * 7919 + 11) % vocab_size).tolist()
        self._prompt, self._root, self._drafted = tokens[:_PROMPT], tokens[_PROMPT], tokens[_PROMPT + 1 :]
        self._expected, self._noise = self._measure_plain()

    def run(self) -> None:
        """Raises Unsupported where the model fails or its scores change.

        Sets `continues_from_layer` to False where only that fails.
        """
        try:
            reason = self._find_failure()
        except EdgespecError as error:
            reason = f"it fails ({reason_of(error)})"
        if reason is not None:
            raise Unsupported(f"this model cannot draft for itself in this way on MLX: {reason}.", hint=_ADVICE)

    def _find_failure(self) -> str | None:
        network, hooks, spread = self._network, self._network.hooks, float(self._expected.std())
        target = self._open_prefilled()
        draft = SharedKVSession(target, network, self._check)
        root, drafted = self._root, self._drafted
        rows_before = hooks.layer_rows
        single = [_score_token(draft, token) for token in (root, *drafted)]
        if hooks.layer_rows - rows_before != len(network.layers) * len(single):  # or they run more rows than these
            return "its layers do not run one after another"
        draft.rewind(0)
        together = draft.forward(root, Draft.chain(drafted))
        # Comparisons with NaN are false, which refuses such scores too.
        if not all(np.abs(together.logits(i) - row).max() < 0.25 * spread for i, row in enumerate(single)):
            return "the draft's scores of several tokens at once are not those of one at a time"
        draft.commit(range(len(drafted)))
        can_continue, difference = network.continues_from_layer, np.float32(np.inf)
        try:
            difference = np.abs(_score_chain(target, root, drafted) - self._expected).max()
        except EdgespecError:
            if not can_continue:
                raise
        is_same = bool(difference <= max(4 * self._noise, 0.02 * spread))
        if can_continue:
            network.continues_from_layer = is_same
        return None if is_same or can_continue else "the target's scores have changed"

    def _measure_plain(self) -> tuple[Logits, float]:
        """[n, V] the target's scores of the root and the drafted tokens as a chain, and their rounding error."""
        root, drafted = self._root, self._drafted
        chain = _score_chain(self._open_prefilled(), root, drafted)
        session = self._open_prefilled()
        single = np.stack([_score_token(session, token) for token in (root, *drafted)])
        return chain, float(np.abs(chain - single).max())

    def _open_prefilled(self) -> MlxSession:
        """A session that holds the prompt."""
        session = self._open_session()
        read_prompt(session, self._prompt)
        return session


def _score_token(session: Session, token: int) -> Logits:
    """[V] after `token`, which is committed."""
    scores = session.forward(token, NO_DRAFT)
    session.commit(())
    return scores.logits(0)


def _score_chain(session: Session, root: int, drafted: Sequence[int]) -> Logits:
    """[n, V] of the forward of a chain."""
    scores = session.forward(root, Draft.chain(drafted))
    return np.stack([scores.logits(i) for i in range(len(drafted) + 1)])
