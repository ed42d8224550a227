"""A bounded reader over the first bytes of a GGUF file: local, or fetched in ranges from a server."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from edgespec.errors import CacheError, InvalidModelFile

PULL_AGAIN = "remove the file and pull it again: edgespec pull"

# A header holds metadata and the vocabulary: about 10 MB for 260,000 tokens. The limit keeps a damaged length from
# reading, or fetching, the weights.
MAX_HEADER_BYTES = 256 * 2**20
MAX_ARRAY_STRINGS = 4 * 2**20
MAX_KEY_BYTES = 2**16 - 1
FIRST_BLOCK = 256 * 2**10
LARGEST_BLOCK = 4 * 2**20

Value = bool | int | float | str | list[str] | np.ndarray

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class ByteSource(Protocol):
    """Where header bytes come from; `size` is the length of the whole file in bytes."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Bytes `offset` to `offset + length`; fewer only where the file ends."""
        ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """A local file, read with plain reads (a file that shrinks meanwhile gives short reads, not a crash)."""

    path: Path

    @property
    def size(self) -> int:
        """Length of the file in bytes; raises CacheError if the file cannot be read."""
        try:
            return os.stat(self.path).st_size
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from `offset`; raises CacheError if the file cannot be read."""
        try:
            with open(self.path, "rb") as file:
                file.seek(offset)
                return file.read(length)
        except OSError as error:
            raise _unreadable(self.path, error) from error


def _unreadable(path: Path, error: OSError) -> CacheError:
    return CacheError(f"{path} cannot be read: {error.strerror or error}.", hint="check the path and its permissions")


class Cursor:
    """Reads values in file order, fetching the file's beginning in growing blocks.

    Every length is checked against the bytes the file has left before anything is read or looped over, so damaged
    input costs no more than the header limit. All failures are InvalidModelFile (or the source's own error).
    """

    def __init__(self, source: ByteSource, name: str) -> None:
        self.name = name
        self.size = source.size
        self.position = 0
        self._source = source
        self._buffer = bytearray()
        self._block = FIRST_BLOCK

    def need(self, count: int, what: str) -> int:
        """Make the next `count` bytes available and step over them; returns the offset where they start."""
        start, end = self.position, self.position + count
        if end > self.size:
            raise self.cut_short(what)
        if end > MAX_HEADER_BYTES:
            raise self.invalid(f"its header runs past {MAX_HEADER_BYTES // 2**20} MiB at {what}")
        while len(self._buffer) < end:
            have = len(self._buffer)
            block = self._source.read(have, min(max(self._block, end - have), self.size - have))
            if not block:
                raise self.cut_short(what)
            self._buffer += block
            self._block = min(2 * self._block, LARGEST_BLOCK)
        self.position = end
        return start

    def u32(self, what: str) -> int:
        """An unsigned 32-bit number."""
        start = self.need(4, what)
        number: int = _U32.unpack_from(self._buffer, start)[0]
        return number

    def u64(self, what: str) -> int:
        """An unsigned 64-bit number."""
        start = self.need(8, what)
        number: int = _U64.unpack_from(self._buffer, start)[0]
        return number

    def raw(self, count: int, what: str) -> bytes:
        """`count` bytes as they are."""
        start = self.need(count, what)
        return bytes(self._buffer[start : start + count])

    def count(self, smallest_item: int, what: str) -> int:
        """A count of items of at least `smallest_item` bytes each; refused if the file has no room for them."""
        number = self.u64(what)
        if number * smallest_item > self.size - self.position:
            raise self.invalid(f"{what} promises {number:,} items, more than the file has room for")
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
        """A metadata value of GGUF type `kind`; text that is not UTF-8 comes with replacement characters."""
        if kind == _STRING:
            return self.raw(self.count(1, what), what).decode("utf-8", errors="replace")
        if kind == _ARRAY:
            return self._array(what)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self.invalid(f"{what} has the unknown value type {kind}")
        start = self.need(scalar.size, what)
        found: bool | int | float = scalar.unpack_from(self._buffer, start)[0]
        return found

    def _array(self, what: str) -> Value:
        kind = self.u32(what)
        if kind == _STRING:
            return self._strings(self.count(8, what), what)
        if kind == _ARRAY:
            raise self.invalid(f"{what} is an array of arrays, which no llama.cpp model has")
        if kind not in _DTYPES:
            raise self.invalid(f"{what} is an array of the unknown value type {kind}")
        dtype = np.dtype(_DTYPES[kind])
        count = self.count(dtype.itemsize, what)
        start = self.need(count * dtype.itemsize, what)
        return np.frombuffer(bytes(self._buffer[start : self.position]), dtype=dtype)

    def _strings(self, count: int, what: str) -> list[str]:
        """`count` strings; bytes that are not UTF-8 are kept as surrogate escapes, so that tokens compare exactly."""
        if count > MAX_ARRAY_STRINGS:
            raise self.invalid(f"{what} promises {count:,} strings; at most {MAX_ARRAY_STRINGS:,} are read")
        found: list[str] = []
        # Half a million turns for a large vocabulary: everything the loop touches is local.
        append, unpack, buffer = found.append, _U64.unpack_from, self._buffer
        start, have = self.position, len(buffer)
        for _ in range(count):
            text = start + 8
            if text > have:
                self.position = start
                self.need(8, what)
                have = len(buffer)
            end = text + unpack(buffer, start)[0]
            if end > have:
                self.position = text
                self.need(end - text, what)
                have = len(buffer)
            append(buffer[text:end].decode("utf-8", "surrogateescape"))
            start = end
        self.position = start
        return found

    def invalid(self, detail: str) -> InvalidModelFile:
        """The error for a file whose content contradicts itself."""
        return InvalidModelFile(f"{self.name} is damaged: {detail}.", hint=PULL_AGAIN)

    def cut_short(self, what: str) -> InvalidModelFile:
        """The error for a file that ends inside its header."""
        return InvalidModelFile(
            f"{self.name} is cut short: its header goes on past the file's {self.size:,} bytes (at {what}).",
            hint=PULL_AGAIN,
        )
