"""Linear layers whose weights can be read with fewer bits: from a second, coarser copy, or from their high bits alone.

An affine weight of 2h bits is w = s * q + b with q = 2^h * hi + lo. Its planes `hi` and `lo` are packed apart, in place
of q. The target adds what two products give, (2^h s) hi + b and s lo; a draft reads `hi` alone, with the mean of what
`lo` may add in its bias: b + (2^h - 1) / 2 * s.
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
from edgespec.backends.mlx.hooks import Hooks
from edgespec.backends.mlx.library import computing
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError

_KEY = "_edgespec_reading"
_FLOAT, _QUANTIZED = (nn.Linear, SwitchLinear), (nn.QuantizedLinear, QuantizedSwitchLinear)
_GROUPS = (64, 32, 128)  # elements that can share a scale; the first for weights that have no groups of such a size
_FLOAT_BITS = 4  # of a weight in floating point, unless told otherwise
_PLANES = (8, 4)  # bits of weights that are split
_LEAST_BITS = 2


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized matrix as mx.quantized_matmul takes it."""

    weight: Any
    scales: Any
    biases: Any
    group: int
    bits: int

    def of(self, x: Any, experts: Any = None, *, are_sorted: bool = False) -> Any:
        """Its product with rows `x`, or that of the matrices of these `experts`."""
        if experts is None:
            return mx.quantized_matmul(
                x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group, bits=self.bits
            )
        return mx.gather_qmm(
            x, self.weight, self.scales, self.biases, rhs_indices=experts, transpose=True, group_size=self.group,
            bits=self.bits, sorted_indices=are_sorted,
        )  # fmt: skip

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        return self.weight, self.scales, self.biases


@dataclass(frozen=True, slots=True)
class Reading:
    """How a layer is read: by a draft, and by the target where that is not as before."""

    hooks: Hooks
    low: Packed
    parts: tuple[Packed, Packed] | None = None


class LowBits:
    """Readings of fewer bits for the linear layers of a model, those of experts among them, until `close`."""

    def __init__(self, hooks: Hooks) -> None:
        self.extra_bytes = 0
        self._hooks = hooks
        self._changed: list[tuple[Any, Any]] = []  # layers and their classes
        self._zeros: dict[tuple[Any, ...], Any] = {}

    def add_copies(
        self, linears: Sequence[Any], bits: int, progress: Callable[[float], None], check: CheckCancelled
    ) -> None:
        """Copies of `bits` a weight (0: half of its own), of the layers that have more.

        Raises Unsupported, BackendError, Cancelled, and has then changed nothing.
        """
        chosen = [(linear, count) for linear in linears if (count := _copy_bits(linear, bits))]
        if not chosen:
            raise Unsupported(
                "its weights have no more bits than such a draft's.", hint="Use fewer bits, or layerskip."
            )
        self._change(chosen, self._copied, progress, check)

    def add_planes(self, linears: Sequence[Any], progress: Callable[[float], None], check: CheckCancelled) -> None:
        """Split the weights into planes. Raises Unsupported, BackendError, Cancelled, and has then changed nothing."""
        chosen = [(linear, linear.bits // 2) for linear in linears if not _unsplit(linear)]
        if not chosen:
            reason = _unsplit(linears[0]) if linears else "it has no linear layers"
            raise Unsupported(f"planes halve affine weights of 8 or 4 bits, and {reason}.", hint="Use qspec instead.")
        self._change(chosen, self._split, progress, check)

    def close(self) -> None:
        """Give the layers their own weights back, bit for bit."""
        while self._changed:
            linear, kind = self._changed.pop()
            reading = linear.__dict__.pop(_KEY)
            linear.__class__ = kind
            if reading.parts is not None:
                high, low = reading.parts
                weight = _joined(high.weight, low.weight, low.bits)
                mx.eval(weight)
                linear["weight"] = weight
        self._zeros.clear()
        self.extra_bytes = 0

    def _change(
        self,
        chosen: Sequence[tuple[Any, int]],
        made: Callable[[Any, int], Reading],
        progress: Callable[[float], None],
        check: CheckCancelled,
    ) -> None:
        """One layer after the other, so that no more than one weight is in memory twice."""
        try:
            for done, (linear, bits) in enumerate(chosen):
                check()
                progress(done / len(chosen))
                with computing():
                    reading = made(linear, bits)
                kind: type = type(linear)
                self._changed.append((linear, kind))
                linear.__dict__[_KEY] = reading
                if reading.parts is not None:
                    linear["weight"] = reading.low.weight
                linear.__class__ = _readable(kind)
        except BaseException:
            self.close()
            raise
        mx.clear_cache()

    def _copied(self, linear: Any, bits: int) -> Reading:
        group = _group(linear)
        weight = linear.weight
        if isinstance(linear, _QUANTIZED):
            scales, biases = linear.scales, linear.get("biases")
            weight = mx.dequantize(
                weight, scales, biases, group_size=linear.group_size, bits=linear.bits, mode=linear.mode
            )
        packed, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
        low = Packed(packed, scales, biases, group, bits)
        mx.eval(low.arrays)
        self.extra_bytes += sum(array.nbytes for array in low.arrays)
        return Reading(self._hooks, low)

    def _split(self, linear: Any, bits: int) -> Reading:
        scales, biases, group = linear.scales, linear.biases, linear.group_size
        high, low = _halves(linear.weight, bits)
        steps, middle = scales * 2**bits, biases + scales * ((2**bits - 1) / 2)
        shape = (*scales.shape, scales.dtype)
        zeros = self._zeros.get(shape)
        mx.eval(high, low, steps, middle)
        self.extra_bytes += steps.nbytes + middle.nbytes
        if zeros is None:
            zeros = self._zeros[shape] = mx.zeros_like(scales)
            self.extra_bytes += zeros.nbytes
        parts = Packed(high, steps, biases, group, bits), Packed(low, scales, zeros, group, bits)
        return Reading(self._hooks, Packed(high, steps, middle, group, bits), parts)


def linears_of(network: Any, left_out: Sequence[Any]) -> list[Any]:
    """The linear layers of a model that are not part of the layers `left_out`; embeddings are none.

    Raises BackendError while they are read with fewer bits already.
    """
    if any(_KEY in module.__dict__ for _, module in network.named_modules()):
        raise BackendError("the model has a low-bit draft already.", hint="Close it before another is made.")
    unread = {id(module) for layer in left_out for _, module in layer.named_modules()}
    found = {id(m): m for _, m in network.named_modules() if type(m) in (*_FLOAT, *_QUANTIZED)}
    return [module for key, module in found.items() if key not in unread]


@cache
def _readable(kind: type) -> Any:
    plain = kind.__call__

    def call(linear: Any, x: Any, experts: Any = None, sorted_indices: bool = False) -> Any:
        reading = linear.__dict__[_KEY]
        step = reading.hooks.now
        if step is not None and step.is_low:
            y = reading.low.of(x, experts, are_sorted=sorted_indices)
        elif reading.parts is not None:
            high, low = (part.of(x, experts, are_sorted=sorted_indices) for part in reading.parts)
            y = high + low
        else:
            return plain(linear, x) if experts is None else plain(linear, x, experts, sorted_indices)
        if "bias" not in linear:
            return y
        return y + (linear["bias"] if experts is None else mx.expand_dims(linear["bias"][experts], -2))

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _copy_bits(linear: Any, bits: int) -> int:
    """Bits of a layer's coarser copy; 0 where there can be none."""
    if not _group(linear) or getattr(linear, "global_scale", None) is not None:
        return 0
    if not isinstance(linear, _QUANTIZED):
        return bits or _FLOAT_BITS
    wanted = bits or linear.bits // 2
    return wanted if _LEAST_BITS <= wanted < linear.bits else 0


def _group(linear: Any) -> int:
    """Elements of a copy that share a scale, its own where it has such; 0 where its rows cannot be divided."""
    width = linear.weight.shape[-1]
    if isinstance(linear, _QUANTIZED):
        if linear.group_size in _GROUPS:
            return int(linear.group_size)
        width = width * 32 // linear.bits
    return next((group for group in _GROUPS if width % group == 0), 0)


def _unsplit(linear: Any) -> str | None:
    """Why a layer's weight has no planes, as the end of a sentence."""
    if not isinstance(linear, _QUANTIZED):
        return "this model's are not quantized"
    if linear.mode != "affine":
        return f"this model's are {linear.mode}"
    return None if linear.bits in _PLANES else f"this model's have {linear.bits}"


def _halves(packed: Any, bits: int) -> tuple[Any, Any]:
    """The high and the low `bits` of elements of twice as many, packed."""
    elements = _unpacked(packed, 2 * bits)
    return _repacked(elements >> bits, bits), _repacked(elements & (2**bits - 1), bits)


def _joined(high: Any, low: Any, bits: int) -> Any:
    """What `_halves` took apart."""
    return _repacked(_unpacked(high, bits) << bits | _unpacked(low, bits), 2 * bits)


def _unpacked(packed: Any, bits: int) -> Any:
    """[..., n] uint8 elements of words that hold them from the lowest bits up; `bits` divide 8."""
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    elements = packed.view(mx.uint8)[..., None] >> shifts & (2**bits - 1)
    return elements.reshape(*packed.shape[:-1], -1)


def _repacked(elements: Any, bits: int) -> Any:
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    parts = elements.reshape(*elements.shape[:-1], -1, 8 // bits) << shifts
    return parts.sum(axis=-1).astype(mx.uint8).view(mx.uint32)
