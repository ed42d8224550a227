"""Forwards that run only some layers, or keep hidden states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgespec.backends.attached_draft import Unsupported

_KEY = "_edgespec_layer"
TRUNK = -1  # the index of the module around the layers, and of its output


@dataclass(slots=True)
class LayerPass:
    """How a forward differs from a plain one.

    layers  those that run, ascending; the others return their input
    input   [1, n, H] replaces the input of the first of `layers`
    output  [1, n, H] the output of the last of them, once the forward is built
    """

    layers: Sequence[int]
    input: Any = None
    output: Any = None


class LayerHooks:
    """Makes the layers of one model follow `current`; while it is None they run as usual.

    Layers and their parameters stay in place. Only the class of each layer changes, to one derived from its own; that
    of the module around them as well. `layer_rows` counts the rows that ran, summed over layers. A forward fills
    `states`, if there are some: the input [batch, n, H] of each layer, the output of the last one, and the output of
    the final norm, which stays None for models whose layers do not lie in a module of their own.
    """

    def __init__(self, model: Any) -> None:
        """Raises Unsupported if a layer occurs twice, or there are none."""
        self.layers = list(get_layers(model))
        if not 0 < len({id(layer) for layer in self.layers}) == len(self.layers):
            raise Unsupported("MLX cannot tell the layers of this model apart.", hint="Use --draft ngram.")
        self.current: LayerPass | None = None
        self.states: list[Any] | None = None
        self.layer_rows = 0
        self._trunk = _find_trunk(model, self.layers)
        for index, layer in enumerate(self.layers):
            self._hook(layer, index, _layer_class)
        if self._trunk is not None:
            self._hook(self._trunk, TRUNK, _trunk_class)

    def forget(self) -> None:
        """Hold no layers any more: they hold these hooks, and would be freed late."""
        self.layers, self._trunk = [], None

    @contextlib.contextmanager
    def build(self, layer_pass: LayerPass | None = None, states: list[Any] | None = None) -> Iterator[None]:
        """While a forward by `layer_pass` is built, or one that fills `states`."""
        self.current, self.states = layer_pass, states
        try:
            yield
        finally:
            self.current = self.states = None

    def _hook(self, module: Any, index: int, derive: Callable[[Any], Any]) -> None:
        module.__dict__[_KEY] = self, index
        module.__class__ = derive(type(module))


def get_layers(model: Any) -> Sequence[Any]:
    return getattr(model, "layers", None) or ()


def _find_trunk(model: Any, layers: Sequence[Any]) -> Any:
    """The module inside `model` that holds the layers and norms what the last one returns; None if there is none."""
    for module in model.modules():
        lists = (each for each in module.values() if isinstance(each, list) and each)
        if module is not model and any(each[0] is layers[0] for each in lists):
            return module
    return None


@cache
def _layer_class(kind: type) -> Any:
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
        if hooks.states is not None:
            hooks.states[index : index + 2] = x, _first(y)
        return y

    return _derive_class(kind, call)


@cache
def _trunk_class(kind: type) -> Any:
    plain = kind.__call__

    def call(trunk: Any, *args: Any, **kwargs: Any) -> Any:
        y = plain(trunk, *args, **kwargs)
        hooks, index = trunk.__dict__[_KEY]
        if hooks.states is not None:
            hooks.states[index] = _first(y)
        return y

    return _derive_class(kind, call)


def _first(y: Any) -> Any:
    """The output of a layer; some models return a tuple that begins with it."""
    return y[0] if isinstance(y, tuple) else y


def _derive_class(kind: type, call: Any) -> Any:
    """A subclass under the same name, whose `__call__` is `call`."""
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
