"""A copy of a model whose linear layers have fewer bits, experts included; all other arrays are the model's own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.hooks import get_layers
from edgespec.backends.mlx.library import map_errors
from edgespec.cancel import check_cancelled
from edgespec.progress import report_loaded

_FLOAT, _QUANTIZED = (nn.Linear, SwitchLinear), (nn.QuantizedLinear, QuantizedSwitchLinear)
_GROUPS = (64, 32, 128)  # elements that can share a scale, the preferred number first
_FLOAT_BITS = 4  # default for a copy of floating-point weights
_MIN_BITS = 2


def make_low_bit(model: Any, layers: Sequence[int], bits: int) -> tuple[Any, int]:
    """A copy of `model` with `bits` a weight (0: half of its own), and the bytes that it takes in addition.

    Of the layers only `layers` are changed, and nothing that has so few bits already. Raises Unsupported, BackendError,
    Cancelled.
    """
    copied = _share(model)
    others = [layer for i, layer in enumerate(get_layers(copied)) if i not in layers]
    skipped = {id(module) for layer in others for module in layer.modules()}
    linears = [m for m in copied.modules() if type(m) in (*_FLOAT, *_QUANTIZED) and id(m) not in skipped]
    chosen = [(linear, count) for linear in linears if (count := _choose_bits(linear, bits))]
    if not chosen:
        raise Unsupported(
            "the model's weights have no more bits than the draft's.", hint="Use fewer bits, or layerskip."
        )
    low: dict[int, Any] = {}
    for done, (linear, count) in enumerate(chosen):
        check_cancelled()
        report_loaded(done / len(chosen))
        with map_errors():
            low[id(linear)] = _requantize(linear, count)
    modules = copied.leaf_modules()
    copied.update_modules(tree_map(lambda m: low.get(id(m), m), modules, is_leaf=nn.Module.is_module))
    mx.clear_cache()
    return copied, sum(each.weight.nbytes + each.scales.nbytes + each.biases.nbytes for each in low.values())


def _share(value: Any) -> Any:
    """A copy of a module, of the modules in it, and of the lists of them; their arrays are the same."""
    if isinstance(value, list | tuple):
        return type(value)(_share(each) for each in value)
    if not isinstance(value, dict):
        return value
    copied = copy.copy(value)  # of a module as well, which is a dictionary
    for name, each in value.items():
        copied[name] = _share(each)
    return copied


def _choose_bits(linear: Any, bits: int) -> int:
    """Bits of a layer's low-bit copy; 0 if there can be none."""
    if not _group_size(linear) or getattr(linear, "global_scale", None) is not None:
        return 0
    own = linear.bits if isinstance(linear, _QUANTIZED) else 2 * _FLOAT_BITS
    n_bits = int(bits or own // 2)
    return n_bits if _MIN_BITS <= n_bits < own else 0


def _group_size(linear: Any) -> int:
    """Elements that share a scale in a copy, as in the layer if possible; 0 if no group size fits its rows."""
    width, groups = linear.weight.shape[-1], [*_GROUPS]
    if isinstance(linear, _QUANTIZED):
        width, groups = width * 32 // linear.bits, [linear.group_size, *_GROUPS]
    return next((group for group in groups if group in _GROUPS and width % group == 0), 0)


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
