"""Forwards of a model over its caches: of some layers only, with hidden states kept, of chains and of trees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.head_session import Features, check_tapped_layers
from edgespec.backends.mlx.caches import Caches, ForwardContext, KVQuantization, TreeRows, tree_positions
from edgespec.backends.mlx.library import read
from edgespec.core.protocols import Draft
from edgespec.core.sampling import Logits, non_finite_error
from edgespec.core.tree import leaves, path_to
from edgespec.errors import BackendError, EdgespecError, reason_of

# Forwards that run only some layers, or keep hidden states.


_KEY = "_edgespec_layer"
_TRUNK = -1  # the index of the module around the layers, and of its output


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
    `states`, where there are some: the input [batch, n, H] of each layer, the output of the last one, and the output of
    the final norm, which stays None for models whose layers do not lie in a module of their own.
    """

    def __init__(self, model: Any) -> None:
        """Raises Unsupported where a layer occurs twice, or there are none."""
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
            self._hook(self._trunk, _TRUNK, _trunk_class)

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
    """What a layer computes, behind which some models have more."""
    return y[0] if isinstance(y, tuple) else y


def _derive_class(kind: type, call: Any) -> Any:
    """A subclass under the same name, whose `__call__` is `call`."""
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


# Hidden states of a session's forwards, for trained heads that draft from them.


class FeatureTap:
    """Reads the hidden states of some layers in forwards of one model; `kept` are those of a session's tokens.

    The inputs of `layers` are concatenated in this order (see formats.heads.HeadSpec); without layers it is the last
    hidden state after the final norm.
    """

    def __init__(self, hooks: LayerHooks, layers: Sequence[int]) -> None:
        """Raises Unsupported for layers that the model does not have."""
        check_tapped_layers(layers, len(hooks.layers))
        self.kept: Features[Any] = Features(mx.concatenate)
        self._hooks = hooks
        self._layers = tuple(layers)

    def run(self, model: Any, tokens: Any, entries: list[Any]) -> tuple[Any, Any]:
        """(logits [batch, n, V] of tokens [batch, n], features [batch, n, width]). Raises Unsupported without these."""
        states: list[Any] = [None] * (len(self._hooks.layers) + 2)
        with self._hooks.build(states=states):
            logits = model(tokens, cache=entries)
        found = [states[layer] for layer in self._layers] or [states[_TRUNK]]
        if not all(isinstance(each, mx.array) and each.shape[:2] == tokens.shape for each in found):
            raise Unsupported(
                "the hidden states of this model cannot be read on MLX: its layers do not return a row for each token.",
                hint="Use --draft ngram, or a draft model.",
            )
        return logits, mx.concatenate(found, axis=-1)


# Forwards of a model over its caches: a chain, or a draft tree in one batch row with a mask, whose rotary positions
# follow the depth. `probe` tries one when a model is loaded, because its code does not tell whether it takes trees.


class ModelRunner:
    """A model with the caches of one sequence. Scores are lazy arrays [rows, V].

    Where there is a `tap`, `features` are those of the last forward, lazy as well: [rows, width].
    """

    def __init__(self, model: Any, quantization: KVQuantization | None = None) -> None:
        """Starts with empty caches, quantized by `quantization`. Raises BackendError for caches of unknown classes."""
        self.context = ForwardContext()
        self.caches = Caches(model, self.context, quantization)
        self.model = model
        self.tap: FeatureTap | None = None
        self.features: Any = None

    def run_chain(self, tokens: Sequence[int]) -> Any:
        return self.run(mx.array([list(tokens)], mx.int32))

    def run(self, tokens: Any) -> Any:
        """Run the tokens of an array [1, n] one after another."""
        if self.tap is None:
            return self.model(tokens, cache=self.caches.entries)[0]
        logits, features = self.tap.run(self.model, tokens, self.caches.entries)
        self.features = features[0]
        return logits[0]

    def run_tree(self, position: int, root: int, draft: Draft) -> Any:
        tokens = mx.array([[root, *draft.tokens.tolist()]], mx.int32)
        tree = TreeRows.from_draft(draft, position)
        with self.context.build(tree), tree_positions(tree.depth):
            return self.run(tokens)


# Tests a loaded model: whether several rows score as single ones do, and whether it takes trees.


# Node 5 stands in row 6 at depth 2: a model that places rows one after another puts it elsewhere.
_TREE = np.asarray([-1, -1, -1, 0, 0, 1], np.int32)
_PROMPT = 6  # tokens before the root


Share = Callable[[Any], Any]
"""Maps the scores of a forward to those that all processes of a split model go by."""


def probe(open_runner: Callable[[], ModelRunner], vocab_size: int, share: Share = lambda scores: scores) -> str | None:
    """Compare a few forwards of several rows with the same tokens one at a time; returns why it takes no trees.

    Differences of up to four times a chain's count as rounding. Raises BackendError if the model cannot decode, or if
    it scores several tokens in one forward differently from one at a time, which prompts need too.
    """
    ids = ((np.arange(_PROMPT + 1 + len(_TREE)) * 7919 + 11) % vocab_size).astype(np.int32)
    prompt, root, draft = ids[:_PROMPT].tolist(), int(ids[_PROMPT]), Draft(ids[_PROMPT + 1 :], _TREE)
    tokens = [root, int(draft.tokens[0]), int(draft.tokens[3])]

    def score(*forwards: Sequence[int]) -> Logits:
        """[n, V] of all forwards but the first, after each other."""
        runner = open_runner()
        return np.concatenate([_to_host(runner.run_chain(each), share) for each in (prompt, *forwards)])[_PROMPT:]

    try:
        single, together = score(*([token] for token in tokens)), score(tokens)
    except EdgespecError:
        raise
    except Exception as error:
        raise _model_error(_short_reason(error)) from error
    if np.isnan(single).any():
        raise non_finite_error()
    noise, spread = float(np.abs(together - single).max()), float(single.std())
    if not noise < 0.25 * spread:
        raise _model_error("its scores of several tokens at once are not those of one at a time")
    runner = open_runner()
    if not runner.caches.can_gather:
        return "its state is recurrent" if not runner.caches.can_trim else "rows of its caches cannot be moved"
    expected = np.empty((1 + len(draft), single.shape[1]), np.float32)
    try:
        for leaf in leaves(draft):
            path = path_to(draft, leaf)
            expected[[0, *(node + 1 for node in path)]] = score([root, *draft.tokens[list(path)].tolist()])
        _to_host(runner.run_chain(prompt), share)
        scores = _to_host(runner.run_tree(len(prompt), root, draft), share)
    except Exception as error:  # noqa: BLE001 - any error means that the model takes no trees
        return _short_reason(error)
    limit = max(4 * noise, 0.02 * spread)
    return None if np.abs(scores - expected).max() <= limit else "its scores of trees are not those of chains"


def _model_error(reason: str) -> BackendError:
    return BackendError(f"MLX cannot run this model: {reason}.", hint="Use --backend llamacpp, or drop --kv-type.")


def _to_host(logits: Any, share: Share) -> Logits:
    rows: Logits = read(share(logits.astype(mx.float32)))[0]
    return rows


def _short_reason(error: Exception) -> str:
    text = reason_of(error)
    return text if len(text) <= 120 else f"{text[:119]}\N{HORIZONTAL ELLIPSIS}"
