"""Linear layers whose weights can be read with fewer bits: from a low-bit copy, or from their high bits alone.

An affine weight of 2h bits is w = s * q + b with q = 2^h * hi + lo. The planes `hi` and `lo` replace q and
are packed separately. The target adds the products with (2^h s) hi + b and with s lo. A draft uses `hi` alone; the mean
of the missing part is in its bias: b + (2^h - 1) / 2 * s.
"""

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
_PLANES = (8, 4)  # bits of weights that are split
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


@dataclass(frozen=True, slots=True)
class WeightViews:
    """The weights of a layer as a draft reads them, and as the target does where they are split into planes."""

    hooks: LayerHooks
    low: QuantizedMatrix
    planes: tuple[QuantizedMatrix, QuantizedMatrix] | None = None


class LowBitWeights:
    """Adds low-bit views to the linear layers of a model, experts included, until `close`."""

    def __init__(self, hooks: LayerHooks) -> None:
        self.extra_bytes = 0
        self._hooks = hooks
        self._changed: list[tuple[Any, Any]] = []  # layers and their own classes
        self._zeros: dict[tuple[Any, ...], Any] = {}

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
        self._change(chosen, self._requantize, progress, check)

    def add_planes(self, linears: Sequence[Any], progress: Callable[[float], None], check: CheckCancelled) -> None:
        """Split the weights into planes.

        Raises Unsupported, BackendError, Cancelled, and then leaves the model unchanged.
        """
        chosen = [(linear, linear.bits // 2) for linear in linears if not _no_planes_reason(linear)]
        if not chosen:
            reason = _no_planes_reason(linears[0]) if linears else "it has no linear layers"
            raise Unsupported(f"planes need affine weights of 8 or 4 bits, and {reason}.", hint="Use qspec instead.")
        self._change(chosen, self._split_planes, progress, check)

    def close(self) -> None:
        """Restore the layers' own weights, bit for bit."""
        while self._changed:
            linear, kind = self._changed.pop()
            views = linear.__dict__.pop(_KEY)
            linear.__class__ = kind
            if views.planes is not None:
                high, low = views.planes
                weight = _join_bits(high.weight, low.weight, low.bits)
                mx.eval(weight)
                linear["weight"] = weight
        self._zeros.clear()
        self.extra_bytes = 0

    def _change(
        self,
        chosen: Sequence[tuple[Any, int]],
        build: Callable[[Any, int], WeightViews],
        progress: Callable[[float], None],
        check: CheckCancelled,
    ) -> None:
        """Change one layer after another, so that at most one weight is in memory twice."""
        try:
            for done, (linear, bits) in enumerate(chosen):
                check()
                progress(done / len(chosen))
                with map_errors():
                    views = build(linear, bits)
                kind: type = type(linear)
                self._changed.append((linear, kind))
                linear.__dict__[_KEY] = views
                if views.planes is not None:
                    linear["weight"] = views.low.weight
                linear.__class__ = _low_bit_class(kind)
        except BaseException:
            self.close()
            raise
        mx.clear_cache()

    def _requantize(self, linear: Any, bits: int) -> WeightViews:
        group = _group_size(linear)
        weight = linear.weight
        if isinstance(linear, _QUANTIZED):
            scales, biases = linear.scales, linear.get("biases")
            weight = mx.dequantize(
                weight, scales, biases, group_size=linear.group_size, bits=linear.bits, mode=linear.mode
            )
        packed, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
        low = QuantizedMatrix(packed, scales, biases, group, bits)
        mx.eval(low.arrays)
        self.extra_bytes += sum(array.nbytes for array in low.arrays)
        return WeightViews(self._hooks, low)

    def _split_planes(self, linear: Any, bits: int) -> WeightViews:
        scales, biases, group = linear.scales, linear.biases, linear.group_size
        high, low = _split_bits(linear.weight, bits)
        steps, middle = scales * 2**bits, biases + scales * ((2**bits - 1) / 2)
        shape = (*scales.shape, scales.dtype)
        zeros = self._zeros.get(shape)
        mx.eval(high, low, steps, middle)
        self.extra_bytes += steps.nbytes + middle.nbytes
        if zeros is None:
            zeros = self._zeros[shape] = mx.zeros_like(scales)
            self.extra_bytes += zeros.nbytes
        planes = QuantizedMatrix(high, steps, biases, group, bits), QuantizedMatrix(low, scales, zeros, group, bits)
        return WeightViews(self._hooks, QuantizedMatrix(high, steps, middle, group, bits), planes)


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
        views = linear.__dict__[_KEY]
        layer_pass = views.hooks.current
        if layer_pass is not None and layer_pass.is_low_bit:
            y = views.low.multiply(x, experts, are_sorted=sorted_indices)
        elif views.planes is not None:
            high, low = (plane.multiply(x, experts, are_sorted=sorted_indices) for plane in views.planes)
            y = high + low
        else:
            return plain(linear, x) if experts is None else plain(linear, x, experts, sorted_indices)
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


def _no_planes_reason(linear: Any) -> str | None:
    """Why a layer's weight cannot be split into planes, as a clause; None where it can."""
    if not isinstance(linear, _QUANTIZED):
        return "this model's weights are not quantized"
    if linear.mode != "affine":
        return f"this model's weights are {linear.mode}"
    return None if linear.bits in _PLANES else f"this model's weights have {linear.bits} bits"


def _split_bits(packed: Any, bits: int) -> tuple[Any, Any]:
    """The high and the low `bits` of elements of twice as many, packed."""
    elements = _unpack(packed, 2 * bits)
    return _pack(elements >> bits, bits), _pack(elements & (2**bits - 1), bits)


def _join_bits(high: Any, low: Any, bits: int) -> Any:
    """The inverse of `_split_bits`."""
    return _pack(_unpack(high, bits) << bits | _unpack(low, bits), 2 * bits)


def _unpack(packed: Any, bits: int) -> Any:
    """[..., n] uint8 elements of words that hold them from the lowest bits up; `bits` divides 8."""
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    elements = packed.view(mx.uint8)[..., None] >> shifts & (2**bits - 1)
    return elements.reshape(*packed.shape[:-1], -1)


def _pack(elements: Any, bits: int) -> Any:
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    parts = elements.reshape(*elements.shape[:-1], -1, 8 // bits) << shifts
    return parts.sum(axis=-1).astype(mx.uint8).view(mx.uint32)
