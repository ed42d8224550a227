"""A bounded reader of the first bytes of a GGUF file, local or remote."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from edgespec.errors import CacheError, InvalidModelFile

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
        """Bytes `offset` to `offset + length`; fewer only where the file ends."""
        ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """A local file, not memory-mapped: if it shrinks meanwhile, reads are short and nothing crashes."""

    path: Path

    @property
    def size(self) -> int:
        """Length of the file in bytes. Raises CacheError if it cannot be read."""
        try:
            return os.stat(self.path).st_size
        except OSError as error:
            raise _read_error(self.path, error) from error

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`. Raises CacheError if the file cannot be read."""
        try:
            with open(self.path, "rb") as file:
                file.seek(offset)
                return file.read(length)
        except OSError as error:
            raise _read_error(self.path, error) from error


def _read_error(path: Path, error: OSError) -> CacheError:
    return CacheError(f"{path} cannot be read: {error.strerror or error}.", hint="Check the path and its permissions.")


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
            raise self.cut_short_error(what)
        if end > MAX_HEADER_BYTES:
            raise self.invalid(f"its header runs past {MAX_HEADER_BYTES // 2**20} MiB at {what}")
        while len(self._buffer) < end:
            have = len(self._buffer)
            block = self._source.read(have, min(max(self._block, end - have), self.size - have))
            if not block:
                raise self.cut_short_error(what)
            self._buffer += block
            self._block = min(2 * self._block, LARGEST_BLOCK)
        self.position = end
        return start

    def u32(self, what: str) -> int:
        """An unsigned 32-bit integer."""
        start = self.reserve(4, what)
        number: int = _U32.unpack_from(self._buffer, start)[0]
        return number

    def u64(self, what: str) -> int:
        """An unsigned 64-bit integer."""
        start = self.reserve(8, what)
        number: int = _U64.unpack_from(self._buffer, start)[0]
        return number

    def raw(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        start = self.reserve(count, what)
        return bytes(self._buffer[start : start + count])

    def count(self, smallest_item: int, what: str) -> int:
        """A number of items of at least `smallest_item` bytes each; refused if they exceed the file."""
        number = self.u64(what)
        if number * smallest_item > self.size - self.position:
            raise self.invalid(f"{what} promises {number:,} items, more than the file can hold")
        return number

    def key(self, what: str) -> str:
        """A metadata key or tensor name: non-empty UTF-8."""
        length = self.count(1, what)
        if length > MAX_KEY_BYTES:
            raise self.invalid(f"{what} is {length:,} bytes long")
        data = self.raw(length, what)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise self.invalid(f"{what} is not UTF-8 text") from None
        if not text or "\0" in text:
            raise self.invalid(f"{what} is empty or holds a zero byte")
        return text

    def value(self, kind: int, what: str) -> Value:
        """A metadata value of GGUF type `kind`; invalid UTF-8 becomes replacement characters."""
        if kind == _STRING:
            return self.raw(self.count(1, what), what).decode("utf-8", errors="replace")
        if kind == _ARRAY:
            return self._read_array(what)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self.invalid(f"{what} has the unknown value type {kind}")
        start = self.reserve(scalar.size, what)
        found: bool | int | float = scalar.unpack_from(self._buffer, start)[0]
        return found

    def _read_array(self, what: str) -> Value:
        kind = self.u32(what)
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
        return InvalidModelFile(f"{self.name} is damaged: {detail}.", hint=PULL_AGAIN)

    def cut_short_error(self, what: str) -> InvalidModelFile:
        """The error for a file that ends inside its header."""
        return InvalidModelFile(
            f"{self.name} is cut short: its header goes on past the file's {self.size:,} bytes (at {what}).",
            hint=PULL_AGAIN,
        )
