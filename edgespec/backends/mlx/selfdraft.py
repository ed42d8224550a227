"""Self-drafts on MLX: some of the target's own layers, fewer bits, and some of its cached rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Unsupported
from edgespec.backends.mlx.cached_tokens import ModelRunner
from edgespec.backends.mlx.caches import KeyValues
from edgespec.backends.mlx.hooks import LayerHooks, get_layers
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.shared_kv import DraftNetwork, SharedKVSession
from edgespec.core.protocols import NO_DRAFT, CheckCancelled, Draft, Session
from edgespec.core.sampling import Logits
from edgespec.core.verify import read_prompt
from edgespec.errors import BackendError, EdgespecError, reason_of
from edgespec.text.tokenizer import Tokenizer

# Linear layers that also have a copy of their weights with fewer bits, which drafts read.


_KEY = "_edgespec_reading"
_FLOAT, _QUANTIZED = (nn.Linear, SwitchLinear), (nn.QuantizedLinear, QuantizedSwitchLinear)
_GROUPS = (64, 32, 128)  # elements that can share a scale, the preferred number first
_FLOAT_BITS = 4  # default for a copy of floating-point weights
_MIN_BITS = 2


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantized matrix as mx.quantized_matmul takes it."""

    weight: Any
    scales: Any
    biases: Any
    group: int
    bits: int

    def multiply(self, x: Any, experts: Any = None, *, are_sorted: bool = False) -> Any:
        """The product with rows `x`, or with the matrices of these `experts` of a mixture."""
        if experts is None:
            return mx.quantized_matmul(
                x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group, bits=self.bits
            )
        return mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=self.group,
            bits=self.bits,
            sorted_indices=are_sorted,
        )

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        return self.weight, self.scales, self.biases


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
                self.extra_bytes += sum(array.nbytes for array in low.arrays)
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

    def call(linear: Any, x: Any, experts: Any = None, sorted_indices: bool = False) -> Any:
        hooks, low = linear.__dict__[_KEY]
        if hooks.current is None or not hooks.current.is_low_bit:
            return plain(linear, x) if experts is None else plain(linear, x, experts, sorted_indices)
        y = low.multiply(x, experts, are_sorted=sorted_indices)
        if "bias" not in linear:
            return y
        return y + (linear["bias"] if experts is None else mx.expand_dims(linear["bias"][experts], -2))

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


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


def _requantize(linear: Any, bits: int) -> QuantizedMatrix:
    group = _group_size(linear)
    weight = linear.weight
    if isinstance(linear, _QUANTIZED):
        scales, biases = linear.scales, linear.get("biases")
        weight = mx.dequantize(weight, scales, biases, group_size=linear.group_size, bits=linear.bits, mode=linear.mode)
    packed, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    low = QuantizedMatrix(packed, scales, biases, group, bits)
    mx.eval(low.arrays)
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
        can_continue = network.continues_from_layer
        try:
            difference = np.abs(_score_chain(target, root, drafted) - self._expected).max()
        except EdgespecError:
            if not can_continue:
                raise
            network.continues_from_layer = False
            return None
        limit = max(4 * self._noise, 0.02 * spread)
        if can_continue:
            network.continues_from_layer = bool(difference <= limit)
        elif not difference <= limit:
            return "the target's scores have changed"
        return None

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
