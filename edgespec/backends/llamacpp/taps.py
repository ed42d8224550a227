"""Hidden states of a context's tokens, copied out of llama.cpp after each decode for a trained head."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.features import Features
from edgespec.backends.llamacpp.experimental import find_function
from edgespec.backends.llamacpp.library import Library

Floats = npt.NDArray[np.float32]

# Whose graphs name the inputs of all their layers, one row of the hidden size for each token: llama.cpp aborts the
# process where others are asked for them. Of 0.3.36; qwen4exp names wider rows, which it also aborts on.
_ARCHITECTURES = frozenset(
    (
        *("bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama"),
        *("mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe"),
        *("qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next"),
    )
)


class LayerInputs:
    """The inputs of some layers, concatenated, for the tokens of one session.

    `features` are those of the session's text.
    """

    def __init__(self, lib: Library, context: int, layers: Sequence[int]) -> None:
        """`context` is a llama_context handle, whose decodes copy these layers from now on. Raises Unsupported."""
        api = lib.api
        model = api.llama_get_model(context)
        _check_layers(_architecture(lib, model), api.llama_model_n_layer(model), layers)
        self.features: Features[Floats] = Features(np.concatenate)
        self._read = find_function("llama_get_embeddings_layer_inp")
        self._context = context
        self._layers = tuple(layers)
        self._size: int = api.llama_model_n_embd(model)
        self._checkpoint: Floats | None = None  # the row before it
        self._checkpoint_at = 0
        enable = find_function("llama_set_embeddings_layer_inp")
        for layer in set(layers):
            enable(context, layer, True)

    @property
    def width(self) -> int:
        """Numbers a token."""
        return len(self._layers) * self._size

    def checkpoint(self) -> None:
        """`truncate` may go back to where the features end now, and then has the row before it, released or not."""
        self._checkpoint_at = self.features.end
        is_kept = self.features.start < self.features.end
        self._checkpoint = self.features.take(self.features.end - 1, self.features.end).copy() if is_kept else None

    def truncate(self, position: int) -> None:
        """Drop the rows from `position` on."""
        self.features.truncate(position)
        if position < self._checkpoint_at:
            self._checkpoint = None
        if self.features.start == position == self._checkpoint_at and self._checkpoint is not None:
            self.features.truncate(position - 1)
            self.features.append(self._checkpoint, 1)

    def read(self, first: int, n: int) -> Floats:
        """[n, width] a copy of rows `first` to `first + n - 1` of the batch that was decoded last, without an error."""
        rows = np.empty((n, len(self._layers), self._size), np.float32)
        for i, layer in enumerate(self._layers):
            start = self._read(self._context, layer) + first * self._size * 4
            rows[:, i] = float_rows(start, n, self._size)
        return rows.reshape(n, self.width)


def float_rows(address: int, n: int, size: int) -> Floats:
    """[n, size] a view of llama.cpp's memory."""
    buffer: Any = (ctypes.c_float * (n * size)).from_address(address)
    return np.frombuffer(buffer, np.float32).reshape(n, size)


def _architecture(lib: Library, model: int) -> str:
    buffer = ctypes.create_string_buffer(128)
    lib.api.llama_model_meta_val_str(model, b"general.architecture", buffer, 128)
    return buffer.value.decode("utf-8", "replace")


def _check_layers(architecture: str, count: int, layers: Sequence[int]) -> None:
    """Raises Unsupported where llama.cpp would abort."""
    if architecture not in _ARCHITECTURES:
        raise Unsupported(
            f"llama.cpp does not give the hidden states of '{architecture}' models, which trained heads need.",
            hint="Use --draft auto or --draft ngram.",
        )
    if not layers:
        raise Unsupported("heads over the last hidden state do not run on llama.cpp yet.", hint="Use --draft auto.")
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        raise Unsupported(
            f"the head reads layer {wrong[0]}, and the model has layers 0 to {count - 1}.",
            hint="Use a head that was trained for this model.",
        )
