"""Encodings of rows of numbers: llama.cpp's types, and MLX's affine groups."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import click
import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from edgespec.backends.llamacpp.library import library
from laboratory.embedding.layout import Tensor
from laboratory.embedding.shapes import Shape

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

GGUF_TYPES = ("Q4_0", "Q8_0", "F16", "Q4_K")
FOLDER_TYPES = ("4bit", "8bit", "F16", "BF16", "F32")
BITS = {"4bit": 4, "8bit": 8}

_DISTINCT_ROWS = 256  # random rows, repeated in random order: billions of random numbers would take hours
_CHUNK_ROWS = 1024  # rows that are widened to the large width at a time
_SPREAD = np.float32(0.02)  # standard deviation of random weights


@dataclass(frozen=True)
class Part:
    """One stored array: suffix of its name, type as safetensors names it, bytes and numbers of a row."""

    suffix: str
    dtype: str
    row_bytes: int
    row_numbers: int


class Encoding(Protocol):
    """Turns rows of single-precision numbers into bytes."""

    def parts(self, columns: int) -> tuple[Part, ...]:
        """The arrays that hold rows of `columns` numbers. Raises click.ClickException."""

    def encode(self, values: Floats) -> tuple[Bytes, ...]:
        """[rows, row_bytes] of each part."""


@dataclass(frozen=True)
class Ggml:
    """One of llama.cpp's types, encoded by its own library."""

    type: Type

    def parts(self, columns: int) -> tuple[Part, ...]:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        if columns % block:
            raise click.ClickException(
                f"{self.type.name} needs rows of whole blocks of {block}, not of {columns} numbers."
            )
        return (Part(".weight", self.type.name, columns // block * size, columns),)

    def encode(self, values: Floats) -> tuple[Bytes, ...]:
        rows, columns = values.shape
        values = np.ascontiguousarray(values)
        encoded = np.empty((rows, self.parts(columns)[0].row_bytes), np.uint8)
        _ggml()(self.type, values.ctypes.data, encoded.ctypes.data, 0, rows, columns, None)
        return (encoded,)


@dataclass(frozen=True)
class Affine:
    """MLX's default quantization: each group of a row has a scale and a bias in half precision."""

    bits: int
    group: int

    def parts(self, columns: int) -> tuple[Part, ...]:
        if columns % self.group:
            raise click.ClickException(f"rows of {columns} numbers are not whole groups of {self.group}.")
        words, groups = columns * self.bits // 32, columns // self.group
        return (
            Part(".weight", "U32", words * 4, words),
            Part(".scales", "F16", groups * 2, groups),
            Part(".biases", "F16", groups * 2, groups),
        )

    def encode(self, values: Floats) -> tuple[Bytes, ...]:
        import mlx.core as mx

        arrays = mx.quantize(mx.array(values).astype(mx.float16), group_size=self.group, bits=self.bits)
        return tuple(np.array(each).view(np.uint8) for each in arrays)


@dataclass(frozen=True)
class GgufStorage:
    """Types of the tensors in a GGUF file of a `large` model; `quant` is one of GGUF_TYPES."""

    quant: str
    large: Shape
    tied: bool

    @property
    def block(self) -> int:
        """Numbers of a row that are encoded together."""
        return int(gguf.GGML_QUANT_SIZES[Type[self.quant]][0])

    @property
    def rounding(self) -> float:
        """Relative rounding error of the norm weights."""
        return 2.0**-24

    def encoding(self, tensor: Tensor) -> Encoding:
        if not tensor.rows:
            return Ggml(Type.F32)
        if self.quant == "Q4_K":
            return Ggml(_q4_k_medium(tensor.name, self.large, tied=self.tied))
        return Ggml(Type[self.quant])


@dataclass(frozen=True)
class FolderStorage:
    """Types of the tensors in a folder; `quant` is one of FOLDER_TYPES, `group` is used where it has BITS."""

    quant: str
    group: int

    @property
    def block(self) -> int:
        """Numbers of a row that are encoded together."""
        return self.group if self.quant in BITS else 1

    @property
    def rounding(self) -> float:
        """Relative rounding error of the norm weights."""
        return {"F32": 2.0**-24, "BF16": 2.0**-8}.get(self.quant, 2.0**-11)

    def encoding(self, tensor: Tensor) -> Encoding:
        if self.quant not in BITS:
            return Ggml(Type[self.quant])
        return Affine(BITS[self.quant], self.group) if tensor.rows else Ggml(Type.F16)


Storage = GgufStorage | FolderStorage


def choose_storage(
    destination: Path, quant: str | None, group: int, small: Shape, large: Shape, *, tied: bool
) -> Storage:
    """The storage for `destination`'s format; `quant` None takes its first type. Raises click.ClickException."""
    types = GGUF_TYPES if destination.suffix == ".gguf" else FOLDER_TYPES
    quant = quant or types[0]
    if quant not in types:
        form = "a GGUF file" if types is GGUF_TYPES else "a folder"
        raise click.ClickException(f"{form} takes the types {', '.join(types)}, not {quant}.")
    if types is GGUF_TYPES:
        return GgufStorage(quant, large, tied)
    if quant in BITS and any(n % group for n in (small.width, small.head, small.ffn)):
        raise click.ClickException(
            f"groups of {group} would mix the source's numbers with padding; use a smaller --group."
        )
    return FolderStorage(quant, group)


def _q4_k_medium(name: str, large: Shape, *, tied: bool) -> Type:
    """llama.cpp's Q4_K_M: the head and some layers' attn_v and ffn_down have more bits."""
    if name == ("token_embd" if tied else "output"):
        return Type.Q6_K
    if not name.endswith(("attn_v", "ffn_down")):
        return Type.Q4_K
    layer, eighth = int(name.split(".")[1]), large.layers // 8
    if layer < eighth or layer >= 7 * large.layers // 8 or (layer - eighth) % 3 == 2:
        return Type.Q6_K
    return Type.Q5_K if name.endswith("attn_v") and large.layers == 80 and large.group > 1 else Type.Q4_K


def encode_tensor(
    tensor: Tensor, encoding: Encoding, weights: Callable[[str], Floats], rng: np.random.Generator
) -> tuple[Bytes, ...]:
    """[rows, row_bytes] of each part of one tensor of the large model; `weights` gives the small model's tensors."""
    rows = max(tensor.rows, 1)
    if tensor.fill is None:
        surround = rng.standard_normal((min(rows, _DISTINCT_ROWS), tensor.columns), dtype=np.float32) * _SPREAD
    else:
        surround = np.full((1, tensor.columns), tensor.fill, np.float32)
    picks = rng.integers(0, len(surround), rows)
    parts = tuple(part[picks] for part in encoding.encode(surround))
    if tensor.source is not None:
        small = np.atleast_2d(weights(tensor.source)) * np.float32(tensor.scale)
        for start in range(0, len(small), _CHUNK_ROWS):
            chunk = small[start : start + _CHUNK_ROWS]
            wide = np.zeros((len(chunk), tensor.columns), np.float32)
            wide[:, tensor.column_at] = chunk
            for part, encoded in zip(parts, encoding.encode(wide), strict=True):
                part[tensor.row_at[start : start + _CHUNK_ROWS]] = encoded
    return parts


@cache
def _ggml() -> Any:
    """ggml_quantize_chunk(type, source, destination, first, rows, columns, importance), loaded with llama.cpp."""
    library()
    from llama_cpp._ggml import libggml

    function = libggml.ggml_quantize_chunk
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [ctypes.c_int, pointer, pointer, size, size, size, pointer], ctypes.c_size_t
    return function
