"""Forwards of a loaded model that run only some of its layers, or read its weights with fewer bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

_KEY = "_edgespec_layer"


@dataclass(slots=True)
class LayerPass:
    """How a forward differs from a plain one.

    layers      those that run, ascending; the others return their input
    is_low_bit  whether linear layers read their weights with fewer bits, where they can (see `lowbit`)
    input       [1, n, H] replaces the input of the first of `layers`
    output      [1, n, H] the output of the last of them, once the forward is built
    """

    layers: Sequence[int]
    is_low_bit: bool = False
    input: Any = None
    output: Any = None


class LayerHooks:
    """Makes the layers of one model follow `current`; while it is None they run as usual.

    Layers and their parameters stay in place. Only the class of each layer changes, to one derived from its own.
    `layer_rows` counts the rows that ran, summed over layers.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self.current: LayerPass | None = None
        self.layer_rows = 0
        for index, layer in enumerate(self.layers):
            kind: type = type(layer)
            layer.__dict__[_KEY] = self, index
            layer.__class__ = _hook_class(kind)

    def close(self) -> None:
        """Give the layers their own classes back."""
        while self.layers:
            layer = self.layers.pop()
            del layer.__dict__[_KEY]
            layer.__class__ = type(layer).__base__

    @contextlib.contextmanager
    def run_pass(self, layer_pass: LayerPass) -> Iterator[None]:
        """While a forward by `layer_pass` is built."""
        self.current = layer_pass
        try:
            yield
        finally:
            self.current = None


@cache
def _hook_class(kind: type) -> Any:
    plain = kind.__call__

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        hooks, index = layer.__dict__[_KEY]
        layer_pass = hooks.current
        x, *more = args or kwargs.values()
        if layer_pass is not None:
            if index not in layer_pass.layers:
                return x
            if layer_pass.input is not None and index == layer_pass.layers[0]:
                x = layer_pass.input
                args, kwargs = ((x, *more), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): x})
        hooks.layer_rows += x.size // x.shape[-1]
        y = plain(layer, *args, **kwargs)
        if layer_pass is not None and index == layer_pass.layers[-1]:
            layer_pass.output = y
        return y

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
