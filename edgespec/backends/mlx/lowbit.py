"""Linear layers that also have a copy of their weights with fewer bits, which drafts read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.hooks import LayerHooks
from edgespec.backends.mlx.library import map_errors
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError

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
