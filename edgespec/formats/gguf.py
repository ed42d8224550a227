"""GGUF headers: metadata, tensor shapes and the expected file size; weights are not read and no runtime is loaded.

The format is that of llama.cpp's gguf.cpp, versions 2 and 3, little endian. Files that llama.cpp would refuse, or crash
on, raise InvalidModelFile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from edgespec.errors import InvalidModelFile
from edgespec.formats.ggml_types import GGML_TYPES, GgmlType
from edgespec.formats.gguf_reader import PULL_AGAIN, ByteSource, Cursor, Value

MAGIC = b"GGUF"
MAX_BLOCKS = 512  # compiled into llama.cpp
MAX_DIMENSIONS = 4
MAX_TENSOR_NAME_BYTES = 63
MAX_ALIGNMENT = 2**20
INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: shape with the fastest dimension first, and its offset in bytes from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, in the file and in memory."""
        return self.type.nbytes(math.prod(self.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The header of a GGUF file. Sizes and offsets are in bytes.

    name           of the file, in messages
    data_offset    start of the tensor data
    expected_size  end of the last tensor
    size           length of the file
    """

    name: str
    version: int
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    expected_size: int
    size: int

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises InvalidModelFile if it is missing."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str) or not found:
            raise self.invalid("it names no architecture (general.architecture)")
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_later_part(self) -> bool:
        """True for the second and later parts of a split file, which hold tensors but no model metadata."""
        part = self.metadata.get("split.no", 0)
        return isinstance(part, int) and part > 0

    def integer(self, key: str) -> int | None:
        """An integer, or None if the key is missing. Raises InvalidModelFile for another type."""
        found = self.metadata.get(key)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int):
            raise self.invalid(f"{key} is not a whole number")
        return found

    @property
    def trained_context(self) -> int | None:
        """Context size in tokens that the model was trained for, if stated."""
        return self.own("context_length")

    def own(self, key: str) -> int | None:
        """The integer `<architecture>.<key>`, or None if it is missing."""
        return self.integer(f"{self.architecture}.{key}")

    def per_block(self, key: str) -> tuple[int, ...] | None:
        """`<architecture>.<key>` as one integer for each block; the file holds one for all, or an array."""
        blocks = self.own("block_count") or 0
        if not 0 <= blocks <= MAX_BLOCKS:
            raise self.invalid(f"{self.architecture}.block_count is {blocks}")
        found = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(found, np.ndarray) and found.dtype.kind in "iu":
            if len(found) < blocks:
                raise self.invalid(f"{self.architecture}.{key} has {len(found)} values for {blocks} blocks")
            return tuple(int(number) for number in found[:blocks])
        number = self.own(key)
        return None if number is None else (number,) * blocks

    def invalid(self, detail: str) -> InvalidModelFile:
        """The error for a header that llama.cpp cannot use."""
        return InvalidModelFile(f"{self.name} is not a usable model: {detail}.", hint=PULL_AGAIN)


def read_header(source: ByteSource, name: str) -> Header:
    """Parse a header from `source`; `name` is the file's name in messages.

    Raises InvalidModelFile for a file that is not a complete, consistent GGUF file. `gguf_validate.check_model` checks
    that it is a language model.
    """
    cursor = Cursor(source, name)
    version = _read_version(cursor)
    tensor_count = cursor.count(24, "the tensor count")
    key_count = cursor.count(13, "the metadata count")
    metadata = _read_metadata(cursor, key_count)
    alignment = _read_alignment(cursor, metadata)
    tensors = _read_tensors(cursor, tensor_count)
    data_offset = _align(cursor.position, alignment) if tensors else cursor.position
    end = _check_layout(cursor, tensors, alignment)
    header = Header(name, version, metadata, tensors, data_offset, data_offset + end, cursor.size)
    if header.expected_size > header.size:
        raise InvalidModelFile(
            f"{name} is cut short: the header promises {header.expected_size:,} bytes, the file has {header.size:,}.",
            hint=PULL_AGAIN,
        )
    return header


def join_parts(parts: Iterable[Header]) -> Header:
    """One header for a split model: the metadata of the first part, the tensors and sizes of all parts."""
    first, *rest = parts
    return replace(
        first,
        tensors=sum((part.tensors for part in rest), first.tensors),
        expected_size=first.expected_size + sum(part.expected_size for part in rest),
        size=first.size + sum(part.size for part in rest),
    )


def _read_version(cursor: Cursor) -> int:
    start = cursor.raw(min(4, cursor.size), "its first bytes")
    if start != MAGIC:
        problem = "is empty" if not start else f"starts with {_show_bytes(start)}"
        raise InvalidModelFile(
            f"{cursor.name} is not a GGUF file: it {problem}.",
            hint="Check the file name. A GGUF file starts with the letters GGUF.",
        )
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise cursor.invalid("it is written for big-endian machines")
    if version not in (2, 3):
        raise InvalidModelFile(
            f"{cursor.name} is GGUF version {version}; versions 2 and 3 are read.",
            hint="Pull a current conversion of this model.",
        )
    return version


def _show_bytes(start: bytes) -> str:
    return repr(start.decode("ascii")) if start.isascii() and start.decode().isprintable() else start.hex(" ")


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.key(f"metadata key {index}")
        if key in metadata:
            raise cursor.invalid(f"the metadata key {key!a} comes twice")
        metadata[key] = cursor.value(cursor.u32(f"the type of {key!a}"), f"the value of {key!a}")
    return metadata


def _read_alignment(cursor: Cursor, metadata: dict[str, Value]) -> int:
    found = metadata.get("general.alignment", 32)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= MAX_ALIGNMENT or found & (found - 1):
        raise cursor.invalid(f"general.alignment is not a power of two up to {MAX_ALIGNMENT}")
    return found


def _read_tensors(cursor: Cursor, count: int) -> tuple[TensorInfo, ...]:
    tensors: list[TensorInfo] = []
    seen: set[str] = set()
    for index in range(count):
        tensor = _read_tensor(cursor, index)
        if tensor.name in seen:
            raise cursor.invalid(f"the tensor {tensor.name!a} comes twice")
        seen.add(tensor.name)
        tensors.append(tensor)
    return tuple(tensors)


def _read_tensor(cursor: Cursor, index: int) -> TensorInfo:
    name = cursor.key(f"the name of tensor {index}")
    if len(name.encode()) > MAX_TENSOR_NAME_BYTES:
        raise cursor.invalid(f"the name of tensor {index} is longer than {MAX_TENSOR_NAME_BYTES} bytes")
    what = f"tensor {name!a}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.invalid(f"{what} has {dimensions} dimensions")
    shape = tuple(cursor.u64(what) for _ in range(dimensions))
    type_id = cursor.u32(what)
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise cursor.invalid(f"{what} has the unknown element type {type_id}")
    if min(shape) < 1 or math.prod(shape) * kind.block_bytes > INT64_MAX:
        raise cursor.invalid(f"{what} has the impossible shape {shape}")
    if shape[0] % kind.block_items:
        raise cursor.invalid(f"{what} has rows of {shape[0]} elements, not whole blocks of {kind.name}")
    return TensorInfo(name, shape, kind, cursor.u64(what))


def _check_layout(cursor: Cursor, tensors: tuple[TensorInfo, ...], alignment: int) -> int:
    """Check that tensors are contiguous, as llama.cpp requires; returns the end of the last one in bytes."""
    expected = end = 0
    for tensor in tensors:
        if tensor.offset != expected:
            problem = "is not aligned" if tensor.offset % alignment else "is not where the one before it ends"
            raise cursor.invalid(f"the data of tensor {tensor.name!a} {problem} (offset {tensor.offset:,})")
        end = tensor.offset + tensor.nbytes
        expected = _align(end, alignment)
    return end


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
