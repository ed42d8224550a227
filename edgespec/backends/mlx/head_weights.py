"""Tensors of a head's folder on MLX, by neutral name (formats.head_tensors), as checked modules."""

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
from edgespec.formats.head_tensors import HEAD_HINT
from edgespec.formats.torch_pickle import read_pickled_tensors


class HeadWeights:
    """Arrays of a file by their neutral name, of which a network takes what it needs.

    On a GPU they keep their type; on a CPU, which emulates half precision, they become float32. A matrix that MLX has
    quantized has `scales` and `biases` beside its `weight`.
    """

    def __init__(self, arrays: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """`names` leads from neutral names to those of `arrays`."""
        self._arrays = arrays
        self._names = names
        self._taken: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def nbytes(self) -> int:
        """Of the arrays that were taken."""
        return sum(array.nbytes for array in self._taken.values())

    @property
    def dtype(self) -> Any:
        """In which the head computes: that of the first numbers that were taken."""
        return next(array.dtype for array in self._taken.values() if mx.issubdtype(array.dtype, mx.floating))

    def vector(self, name: str, size: int, shift: float = 0.0) -> Any:
        """[size] such as the weights of a norm, plus `shift`. Raises InvalidModelFile."""
        self._check(name, (size,), self.shape(name))
        return self._take(self._names[name], lambda x: x + shift if shift else x)

    def table(self, name: str) -> Any:
        """An array as it is in the file, such as the ids of a reduced vocabulary."""
        return self._take(self._names[name])

    def rows(self, name: str) -> int:
        """Of a matrix."""
        return self.shape(name)[0] if self.shape(name) else 0

    def columns(self, name: str) -> int:
        """Of a matrix that is not quantized."""
        return self.shape(name)[-1] if self.shape(name) else 0

    def linear(self, name: str, rows: int, columns: int) -> Any:
        """A layer that multiplies by the matrix [rows, columns], with a bias if the file has one.

        Raises InvalidModelFile.
        """
        bias = f"{self._stem(name)}.bias"
        layer: Any = nn.Linear(columns, rows, bias=bias in self._arrays)
        if bias in self._arrays:
            self._check(f"{name}.bias", (rows,), tuple(self._arrays[bias].shape))
        if (settings := self._read_quantization(name, (rows, columns))) is not None:
            layer = nn.QuantizedLinear(columns, rows, bias in self._arrays, *settings)
        return self._fill(layer, name)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Any:
        """mlx-lm's layer that multiplies by some of the matrices [count, rows, columns]. Raises InvalidModelFile."""
        layer: Any = SwitchLinear(*shape[::-1], bias=False)
        if (settings := self._read_quantization(name, shape)) is not None:
            layer = QuantizedSwitchLinear(*shape[::-1], False, *settings)
        return self._fill(layer, name)

    def embedding(self, name: str, rows: int, columns: int) -> Any:
        """A layer that looks up rows [columns] by token. Raises InvalidModelFile."""
        layer: Any = nn.Embedding(rows, columns)
        if (settings := self._read_quantization(name, (rows, columns))) is not None:
            layer = nn.QuantizedEmbedding(rows, columns, *settings)
        return self._fill(layer, name)

    def mean(self, name: str) -> float:
        """Of an array's elements. Raises BackendError."""
        with map_errors():
            return float(mx.mean(self._arrays[self._names[name]].astype(mx.float32)).item())

    def load(self) -> None:
        """Read what was taken from the files. Raises BackendError."""
        with map_errors():
            mx.eval(self._taken)

    def _stem(self, name: str) -> str:
        return self._names[name].removesuffix(".weight")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an array as it is in the file."""
        return tuple(self._arrays[self._names[name]].shape)

    def _take(self, key: str, change: Callable[[Any], Any] = lambda x: x) -> Any:
        array = change(self._arrays[key])
        if mx.issubdtype(array.dtype, mx.floating) and not device().on_gpu:
            array = array.astype(mx.float32)
        self._taken[key] = array
        return array

    def _fill(self, layer: Any, name: str) -> Any:
        for part in layer.parameters():
            layer[part] = self._take(f"{self._stem(name)}.{part}")
        return layer

    def _read_quantization(self, name: str, expected: tuple[int, ...]) -> tuple[int, int] | None:
        """(elements that share a scale, bits of one) of quantized matrices; None for plain ones.

        Raises InvalidModelFile for those of another shape.
        """
        stem, shape = self._stem(name), self.shape(name)
        scales = self._arrays.get(f"{stem}.scales")
        if scales is None:
            self._check(name, expected, shape)
            return None
        biases = self._arrays.get(f"{stem}.biases")
        if biases is None or biases.shape != scales.shape or scales.ndim != len(expected):
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
    """Array by name of a folder's safetensors, which are read when they are needed; or else of its pickles.

    Raises InvalidModelFile, CacheError.
    """
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
