"""Passes of a loaded model that run some of its layers only, or read its weights with fewer bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

_KEY = "_edgespec_layer"


@dataclass(slots=True)
class Pass:
    """What is special about a forward.

    layers  those that run, ascending; the others return what they are given
    is_low  whether linear layers read their weights with fewer bits, where they can (see `lowbit`)
    entry   [1, n, H] what the first of `layers` is given in place of its input
    left    [1, n, H] what the last of them returned, once the forward is built
    """

    layers: Sequence[int]
    is_low: bool = False
    entry: Any = None
    left: Any = None


class Hooks:
    """Makes the layers of one model do as `now` says; without it they do what they always did.

    Layers and their parameters keep their places in the model: what changes is the class of each, to one derived
    from its own. `layer_rows` counts the rows that went through layers, as often as they did.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self.now: Pass | None = None
        self.layer_rows = 0
        for index, layer in enumerate(self.layers):
            kind: type = type(layer)
            layer.__dict__[_KEY] = self, index
            layer.__class__ = _hooked(kind)

    def close(self) -> None:
        """Make the layers what they were."""
        while self.layers:
            layer = self.layers.pop()
            del layer.__dict__[_KEY]
            layer.__class__ = type(layer).__base__

    @contextlib.contextmanager
    def passing(self, step: Pass) -> Iterator[None]:
        """While a forward of this kind is built."""
        self.now = step
        try:
            yield
        finally:
            self.now = None


@cache
def _hooked(kind: type) -> Any:
    plain = kind.__call__

    def call(layer: Any, *given: Any, **named: Any) -> Any:
        hooks, index = layer.__dict__[_KEY]
        step = hooks.now
        x, *more = given or named.values()
        if step is not None:
            if index not in step.layers:
                return x
            if step.entry is not None and index == step.layers[0]:
                x = step.entry
                given, named = ((x, *more), named) if given else ((), {**named, next(iter(named)): x})
        hooks.layer_rows += x.size // x.shape[-1]
        y = plain(layer, *given, **named)
        if step is not None and index == step.layers[-1]:
            step.left = y
        return y

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
