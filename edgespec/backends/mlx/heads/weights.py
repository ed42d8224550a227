"""The weights of a trained head's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from edgespec.backends.mlx.library import device, map_errors
from edgespec.errors import InvalidModelFile, reason_of
from edgespec.formats.head_file import find_weights
from edgespec.formats.heads import HEAD_HINT
from edgespec.formats.torch_pickle import read_pickled_tensors


class HeadWeights:
    """Arrays of a file by their neutral name, of which a network takes what it needs.

    On a GPU they keep their type; on a CPU, which emulates half precision, they become float32. A matrix that MLX has
    quantized has `scales` and `biases` beside its `weight`.
    """

    def __init__(self, arrays: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """`names` leads from neutral names to those of `arrays`."""
        self.names = names
        self._arrays = arrays
        self._taken: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def nbytes(self) -> int:
        """Size of the arrays that were taken."""
        return sum(array.nbytes for array in self._taken.values())

    @property
    def layer_prefixes(self) -> list[str]:
        """The prefix of the neutral names of each layer; one empty prefix if layers are not numbered."""
        numbered = sum(name.endswith(".q") for name in self.names)
        return [f"{i}." for i in range(numbered)] or [""]

    @property
    def dtype(self) -> Any:
        """Compute dtype: the first float tensor's."""
        return next(array.dtype for array in self._taken.values() if mx.issubdtype(array.dtype, mx.floating))

    def vector(self, name: str, size: int, shift: float = 0.0) -> Any:
        """[size] such as the weights of a norm, plus `shift`. Raises InvalidModelFile."""
        self._check(name, (size,), self.shape(name))
        return self._take(self.names[name], lambda x: x + shift if shift else x)

    def table(self, name: str) -> Any:
        """An array as it is in the file, such as the ids of a reduced vocabulary."""
        return self._take(self.names[name])

    def linear(self, name: str, rows: int, columns: int) -> Any:
        """A layer for the matrix [rows, columns], with a bias if the file has one. Raises InvalidModelFile."""
        bias = self._arrays.get(f"{self._stem(name)}.bias")
        if bias is not None:
            self._check(f"{name}.bias", (rows,), tuple(bias.shape))
        return self._make((nn.Linear, nn.QuantizedLinear), name, (rows, columns), columns, rows, bias is not None)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Any:
        """mlx-lm's layer that multiplies by some of the matrices [count, rows, columns]. Raises InvalidModelFile."""
        return self._make((SwitchLinear, QuantizedSwitchLinear), name, shape, *shape[::-1], False)

    def embedding(self, name: str, rows: int, columns: int) -> Any:
        """A layer that looks up rows [columns] by token. Raises InvalidModelFile."""
        return self._make((nn.Embedding, nn.QuantizedEmbedding), name, (rows, columns), rows, columns)

    def mean(self, name: str) -> float:
        """The mean of an array's elements. Raises BackendError."""
        with map_errors():
            return float(mx.mean(self._arrays[self.names[name]].astype(mx.float32)).item())

    def load(self) -> None:
        """Read what was taken from the files. Raises BackendError."""
        with map_errors():
            mx.eval(self._taken)

    def _stem(self, name: str) -> str:
        return self.names[name].removesuffix(".weight")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array as it is in the file."""
        return tuple(self._arrays[self.names[name]].shape)

    def _take(self, key: str, change: Callable[[Any], Any] = lambda x: x) -> Any:
        array = change(self._arrays[key])
        if mx.issubdtype(array.dtype, mx.floating) and not device().on_gpu:
            array = array.astype(mx.float32)
        self._taken[key] = array
        return array

    def _make(self, kinds: tuple[Any, Any], name: str, shape: tuple[int, ...], *sizes: int) -> Any:
        """A layer of the first of `kinds`, or of the second if the file is quantized, made with `sizes`."""
        plain, quantized = kinds
        settings = self._read_quantization(name, shape)
        layer = plain(*sizes) if settings is None else quantized(*sizes, *settings)
        for part in layer.parameters():
            layer[part] = self._take(f"{self._stem(name)}.{part}")
        return layer

    def _read_quantization(self, name: str, expected: tuple[int, ...]) -> tuple[int, int] | None:
        """(elements that share a scale, bits of one); None for plain matrices. Raises InvalidModelFile."""
        stem, shape = self._stem(name), self.shape(name)
        scales = self._arrays.get(f"{stem}.scales")
        if scales is None:
            self._check(name, expected, shape)
            return None
        biases = self._arrays.get(f"{stem}.biases")
        if biases is None or biases.shape != scales.shape or scales.ndim != len(expected) or not scales.size:
            raise InvalidModelFile(
                f"The head's tensor {name} is not quantized as MLX does by default, with scales and biases.",
                hint="Use the head's release in half precision, or one of 4 or 8 bits.",
            )
        columns = expected[-1]
        group, bits = columns // scales.shape[-1], 32 * shape[-1] // columns
        self._check(name, expected, (*shape[:-1], scales.shape[-1] * group))
        if shape[-1] * 32 != columns * bits or bits not in (2, 3, 4, 5, 6, 8):
            raise InvalidModelFile(f"The head's tensor {name} is quantized in an unknown way.", hint=HEAD_HINT)
        return group, bits

    def _check(self, name: str, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if shape != expected:
            raise InvalidModelFile(f"The head's tensor {name} has the shape {shape}, not {expected}.", hint=HEAD_HINT)


def read_arrays(folder: Path) -> dict[str, Any]:
    """Array by name of a folder's safetensors, or else of its pickles; lazy. Raises InvalidModelFile, CacheError."""
    arrays: dict[str, Any] = {}
    for file in find_weights(folder):
        try:
            if file.suffix == ".safetensors":
                arrays |= mx.load(str(file))
            else:
                arrays |= {name: mx.array(each) for name, each in read_pickled_tensors(file).items()}
        except RuntimeError as error:
            raise InvalidModelFile(f"MLX cannot read {file}: {reason_of(error)}.", hint=HEAD_HINT) from error
    return arrays
