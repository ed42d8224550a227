"""GGUF headers: metadata, tensor shapes and the expected file size; weights are not read and no runtime is loaded.

The format is that of llama.cpp's gguf.cpp, versions 2 and 3, little endian. Files that llama.cpp would refuse, or crash
on, raise InvalidModelFile.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgespec.errors import InvalidModelFile, reading
from edgespec.formats.ggml_types import GGML_TYPES, GgmlType

PULL_AGAIN = "Remove the file and pull it again with `edgespec pull`."
# A header with a vocabulary of 260,000 tokens has about 10 MB. The limit prevents a damaged length from causing the
# weights to be read or downloaded.
MAX_HEADER_BYTES = 256 * 2**20
MAX_ARRAY_STRINGS = 4 * 2**20
MAX_KEY_BYTES = 2**16 - 1
FIRST_BLOCK = 256 * 2**10
LARGEST_BLOCK = 4 * 2**20
Value = bool | int | float | str | list[str] | np.ndarray
# Value type -> format character, which means the same to struct and to numpy.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in _FORMATS.items()}
_DTYPES = {kind: np.dtype(code).newbyteorder("<") for kind, code in _FORMATS.items()}
_STRING = 8
_ARRAY = 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


class ByteSource(Protocol):
    """Source of header bytes; `size` is the length of the whole file in bytes."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Bytes `offset` to `offset + length`; fewer only if the file ends before."""
        ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """A local file, not memory-mapped: if it shrinks meanwhile, reads are short and nothing crashes."""

    path: Path

    @property
    def size(self) -> int:
        """Length of the file in bytes. Raises CacheError if it cannot be read."""
        with reading(self.path):
            return os.stat(self.path).st_size

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`. Raises CacheError if the file cannot be read."""
        with reading(self.path), open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(length)


class Cursor:
    """Reads values in file order and fetches the file in growing blocks.

    Every length is checked against the remaining bytes of the file before it is used, so that damaged input cannot cost
    more than the header limit. Failures raise InvalidModelFile, or the source's own error.
    """

    def __init__(self, source: ByteSource, name: str) -> None:
        self.name = name
        self.size = source.size
        self.position = 0
        self._source = source
        self._buffer = bytearray()
        self._block = FIRST_BLOCK

    def reserve(self, count: int, what: str) -> int:
        """Make the next `count` bytes available and advance past them; returns their offset."""
        start, end = self.position, self.position + count
        if end > self.size:
            raise InvalidModelFile(
                f"'{self.name}' is cut short: its header goes on past the file's {self.size:,} bytes (at {what}).",
                hint=PULL_AGAIN,
            )
        if end > MAX_HEADER_BYTES:
            raise self.invalid(f"its header runs past {MAX_HEADER_BYTES // 2**20} MiB at {what}")
        while len(self._buffer) < end:
            have = len(self._buffer)
            block = self._source.read(have, min(max(self._block, end - have), self.size - have))
            if not block:
                raise self.invalid(f"it became shorter while it was read, at {what}")
            self._buffer += block
            self._block = min(2 * self._block, LARGEST_BLOCK)
        self.position = end
        return start

    def number(self, what: str, form: struct.Struct = _U32) -> Any:
        return form.unpack_from(self._buffer, self.reserve(form.size, what))[0]

    def raw(self, count: int, what: str) -> bytes:
        start = self.reserve(count, what)
        return bytes(self._buffer[start : start + count])

    def count(self, smallest_item: int, what: str) -> int:
        """A number of items of at least `smallest_item` bytes each; refused if they exceed the file."""
        number: int = self.number(what, _U64)
        if number * smallest_item > self.size - self.position:
            raise self.invalid(f"{what} promises {number:,} items, more than the file can hold")
        return number

    def key(self, what: str) -> str:
        """A metadata key or tensor name: non-empty UTF-8."""
        data = self.raw(self.count(1, what), what)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise self.invalid(f"{what} is not UTF-8 text") from None
        if not 0 < len(data) <= MAX_KEY_BYTES or "\0" in text:
            raise self.invalid(f"{what} is empty, too long, or holds a zero byte")
        return text

    def value(self, kind: int, what: str) -> Value:
        """A metadata value of GGUF type `kind`; invalid UTF-8 becomes replacement characters."""
        if kind == _STRING:
            return self.raw(self.count(1, what), what).decode("utf-8", errors="replace")
        if kind == _ARRAY:
            return self._read_array(what)
        if kind not in _SCALARS:
            raise self.invalid(f"{what} has the unknown value type {kind}")
        return self.number(what, _SCALARS[kind])  # type: ignore[no-any-return]

    def _read_array(self, what: str) -> Value:
        kind: int = self.number(what)
        if kind == _STRING:
            return self._read_strings(self.count(8, what), what)
        if kind == _ARRAY:
            raise self.invalid(f"{what} is an array of arrays, which no llama.cpp model has")
        if kind not in _DTYPES:
            raise self.invalid(f"{what} is an array of the unknown value type {kind}")
        dtype = _DTYPES[kind]
        count = self.count(dtype.itemsize, what)
        start = self.reserve(count * dtype.itemsize, what)
        return np.frombuffer(bytes(self._buffer[start : self.position]), dtype=dtype)

    def _read_strings(self, count: int, what: str) -> list[str]:
        """`count` strings; invalid UTF-8 is kept as surrogate escapes, so that tokens compare exactly."""
        if count > MAX_ARRAY_STRINGS:
            raise self.invalid(f"{what} promises {count:,} strings; at most {MAX_ARRAY_STRINGS:,} are read")
        found: list[str] = []
        # Up to half a million iterations: the loop uses local names only.
        append, unpack, buffer = found.append, _U64.unpack_from, self._buffer
        start, have = self.position, len(buffer)
        for _ in range(count):
            text = start + 8
            if text > have:
                self.position = start
                self.reserve(8, what)
                have = len(buffer)
            end = text + unpack(buffer, start)[0]
            if end > have:
                self.position = text
                self.reserve(end - text, what)
                have = len(buffer)
            append(buffer[text:end].decode("utf-8", "surrogateescape"))
            start = end
        self.position = start
        return found

    def invalid(self, detail: str) -> InvalidModelFile:
        """The error for inconsistent content."""
        return InvalidModelFile(f"'{self.name}' is damaged: {detail}.", hint=PULL_AGAIN)


MAGIC = b"GGUF"
MAX_BLOCKS = 512  # compiled into llama.cpp
MAX_SIZE = 2**24  # the largest dimension of a layer
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

    @property
    def block(self) -> int:
        """The block that it belongs to; -1 outside of blocks."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdecimal() else -1


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The header of a GGUF file. Sizes and offsets are in bytes.

    name         of the file, in messages
    data_offset  start of the tensor data
    """

    name: str
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises InvalidModelFile if it is missing."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str) or not found:
            raise self.invalid("it names no architecture (general.architecture)")
        return found

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_later_part(self) -> bool:
        """True for the second and later parts of a split file, which hold tensors but no model metadata."""
        part = self.metadata.get("split.no", 0)
        return isinstance(part, int) and part > 0

    @property
    def tokens(self) -> list[str]:
        """The spellings of the vocabulary by id; empty if it has none."""
        found = self.metadata.get("tokenizer.ggml.tokens")
        return found if isinstance(found, list) else []

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
        """`<architecture>.<key>` as one integer for each block; None if it is missing.

        The file has an array, or one number for all blocks. Truth values become 0 and 1. Raises InvalidModelFile.
        """
        blocks = self.own("block_count") or 0
        if not 0 <= blocks <= MAX_BLOCKS:
            raise self.invalid(f"{self.architecture}.block_count is {blocks}")
        found = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(found, np.ndarray) and found.dtype.kind in "iub":
            if len(found) < blocks:
                raise self.invalid(f"{self.architecture}.{key} has {len(found)} values for {blocks} blocks")
            return tuple(int(number) for number in found[:blocks])
        number = self.own(key)
        return None if number is None else (number,) * blocks

    def size(self, key: str, limit: int = MAX_SIZE) -> int:
        """The integer `<architecture>.<key>`. Raises InvalidModelFile unless it is there and from 1 to `limit`."""
        number = self.own(key)
        if number is None or not 0 < number <= limit:
            problem = "is missing" if number is None else f"is {number}"
            raise self.invalid(f"{self.architecture}.{key} {problem}")
        return number

    def tensor(self, name: str) -> TensorInfo | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the tensor `name`, fastest dimension first; None if there is none."""
        return found.shape if (found := self.tensor(name)) is not None else None

    def invalid(self, detail: str) -> InvalidModelFile:
        """The error for a header that llama.cpp cannot use."""
        return InvalidModelFile(f"'{self.name}' is not a usable model: {detail}.", hint=PULL_AGAIN)


def read_header(source: ByteSource, name: str) -> Header:
    """Parse a header from `source`; `name` is the file's name in messages.

    Raises InvalidModelFile for a file that is not a complete, consistent GGUF file. `gguf_validate.check_model` checks
    that it is a language model.
    """
    cursor = Cursor(source, name)
    _check_version(cursor)
    tensor_count = cursor.count(24, "the tensor count")
    key_count = cursor.count(13, "the metadata count")
    metadata = _read_metadata(cursor, key_count)
    alignment = _read_alignment(cursor, metadata)
    tensors = tuple(_read_tensor(cursor, index) for index in range(tensor_count))
    data_offset = _align(cursor.position, alignment) if tensors else cursor.position
    end = data_offset + _check_layout(cursor, tensors, alignment)
    if end > cursor.size:
        raise InvalidModelFile(
            f"'{name}' is cut short: the header promises {end:,} bytes, the file has {cursor.size:,}.", hint=PULL_AGAIN
        )
    return Header(name, metadata, tensors, data_offset)


def join_parts(parts: Iterable[Header]) -> Header:
    """One header for a split model: the metadata of the first part, the tensors of all parts."""
    first, *rest = parts
    return replace(first, tensors=sum((part.tensors for part in rest), first.tensors))


def _check_version(cursor: Cursor) -> None:
    start = cursor.raw(min(4, cursor.size), "its first bytes")
    if start != MAGIC:
        problem = f"starts with {str(start)[1:]}" if start else "is empty"
        raise InvalidModelFile(
            f"'{cursor.name}' is not a GGUF file: it {problem}.",
            hint="Check the file name. A GGUF file starts with the letters GGUF.",
        )
    version = cursor.number("the version")
    if version & 0xFFFF == 0:
        raise cursor.invalid("it is written for big-endian machines")
    if version not in (2, 3):
        raise InvalidModelFile(
            f"'{cursor.name}' is GGUF version {version}; versions 2 and 3 are read.",
            hint="Pull a current conversion of this model.",
        )


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.key(f"metadata key {index}")
        if key in metadata:
            raise cursor.invalid(f"the metadata key {key!a} comes twice")
        metadata[key] = cursor.value(cursor.number(f"the type of {key!a}"), f"the value of {key!a}")
    return metadata


def _read_alignment(cursor: Cursor, metadata: dict[str, Value]) -> int:
    found = metadata.get("general.alignment", 32)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= MAX_ALIGNMENT or found & (found - 1):
        raise cursor.invalid(f"general.alignment is not a power of two up to {MAX_ALIGNMENT}")
    return found


def _read_tensor(cursor: Cursor, index: int) -> TensorInfo:
    name = cursor.key(f"the name of tensor {index}")
    if len(name.encode()) > MAX_TENSOR_NAME_BYTES:
        raise cursor.invalid(f"the name of tensor {index} is longer than {MAX_TENSOR_NAME_BYTES} bytes")
    what = f"tensor {name!a}"
    dimensions = cursor.number(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.invalid(f"{what} has {dimensions} dimensions")
    shape = tuple(cursor.number(what, _U64) for _ in range(dimensions))
    type_id = cursor.number(what)
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise cursor.invalid(f"{what} has the unknown element type {type_id}")
    if min(shape) < 1 or math.prod(shape) * kind.block_bytes > INT64_MAX:
        raise cursor.invalid(f"{what} has the impossible shape {shape}")
    if shape[0] % kind.block_items:
        raise cursor.invalid(f"{what} has rows of {shape[0]} elements, not whole blocks of {kind.name}")
    return TensorInfo(name, shape, kind, cursor.number(what, _U64))


def _check_layout(cursor: Cursor, tensors: tuple[TensorInfo, ...], alignment: int) -> int:
    """The end of the last tensor in bytes. Checks that all are contiguous and have names of their own."""
    expected = end = 0
    seen = set[str]()
    for tensor in tensors:
        if tensor.name in seen:
            raise cursor.invalid(f"the tensor {tensor.name!a} comes twice")
        seen.add(tensor.name)
        if tensor.offset != expected:
            problem = "is not aligned" if tensor.offset % alignment else "is not where the one before it ends"
            raise cursor.invalid(f"the data of tensor {tensor.name!a} {problem} (offset {tensor.offset:,})")
        end = tensor.offset + tensor.nbytes
        expected = _align(end, alignment)
    return end


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
