"""Hidden states of a context's tokens, copied out of llama.cpp after each decode for a trained head."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.features import Features
from edgespec.backends.head_session import check_tapped_layers
from edgespec.backends.llamacpp.abi import WITH_LAST_STATE, WITH_LAYER_INPUTS, find_function
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.native_context import MAX_TOKENS

Floats = npt.NDArray[np.float32]


class HiddenStates:
    """The inputs of some layers, or the last hidden state, of a session's tokens; `features` are those of its text."""

    def __init__(self, lib: Library, context: int, layers: Sequence[int]) -> None:
        """`context` is a llama_context handle; its decodes now copy these layers' inputs.

        An index equal to the layer count, or no index, means the final norm's output. Raises Unsupported.
        """
        self._lib = lib
        api = lib.api
        model = api.llama_get_model(context)
        count: int = api.llama_model_n_layer(model)
        self._layers = tuple(layers) or (count,)
        _check_layers(lib.metadata(model, b"general.architecture").decode("utf-8", "replace"), count, self._layers)
        self.features: Features[Floats] = Features(np.concatenate)
        self._context = context
        self._size: int = api.llama_model_n_embd(model)
        self.width = len(self._layers) * self._size  # numbers a token
        self._readers = [_enable(context, layer, is_last=layer == count) for layer in self._layers]
        self._buffers: dict[int, Floats] = {}  # llama.cpp's, by address

    def follow(self, context: int) -> HiddenStates:
        """The hidden states of the same text in another context of the model, to which it moves.

        `features` stay the same object. Raises Unsupported.
        """
        moved = HiddenStates(self._lib, context, self._layers)
        moved.features = self.features
        return moved

    def read(self, first: int, n: int) -> Floats:
        """[n, width] a copy of rows `first` to `first + n - 1` of the batch that was decoded last, without an error."""
        rows = np.empty((n, len(self._readers), self._size), np.float32)
        for i, find in enumerate(self._readers):
            address = find()
            if (buffer := self._buffers.get(address)) is None:
                self._buffers[address] = buffer = float_rows(address, MAX_TOKENS, self._size)
            rows[:, i] = buffer[first : first + n]
        return rows.reshape(n, self.width)


def float_rows(address: int, n: int, size: int) -> Floats:
    """[n, size] a view of llama.cpp's memory."""
    buffer: Any = (ctypes.c_float * (n * size)).from_address(address)
    return np.frombuffer(buffer, np.float32).reshape(n, size)


def _enable(context: int, layer: int, *, is_last: bool) -> Callable[[], int]:
    """Have decodes copy a layer's input, or the last hidden state; returns what finds the address of its first row."""
    if is_last:
        find_function("llama_set_embeddings_nextn")(context, True, False)
        return partial(find_function("llama_get_embeddings_nextn"), context)
    find_function("llama_set_embeddings_layer_inp")(context, layer, True)
    return partial(find_function("llama_get_embeddings_layer_inp"), context, layer)


def _check_layers(architecture: str, count: int, layers: Sequence[int]) -> None:
    """Raises Unsupported if llama.cpp would abort, or give no rows."""
    check_tapped_layers(layers, count)
    for name, is_wanted, architectures in (
        ("hidden states", any(layer < count for layer in layers), WITH_LAYER_INPUTS),
        ("last hidden state", count in layers, WITH_LAST_STATE),
    ):
        if is_wanted and architecture not in architectures:
            raise Unsupported(
                f"llama.cpp does not give the {name} of '{architecture}' models, which the head reads.",
                hint="Use --draft auto or --draft ngram.",
            )
