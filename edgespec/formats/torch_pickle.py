"""Tensors of a file written by torch.save (.pt, .bin), read without running anything from it.

The file is a zip with a pickle, which is a program, and one entry of raw bytes a storage. Python's own reader of
pickles runs it here without most of its operations, and with three names: what is left can build numbers, texts,
tuples, dictionaries and descriptions of tensors. Whatever asks for more raises InvalidModelFile.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edgespec.errors import InvalidModelFile, reading

T = TypeVar("T")
_MAX_PICKLE_BYTES = 2**20  # a thousand tensors take about 150 kB
_MAX_DIMENSIONS = 8
_MAX_SHARED = 4  # tensors of a storage, on average: embeddings and an output matrix may share one
_HINT = "Use the head's safetensors release, or convert it with a program that you trust."

# Storage class -> element type. numpy has no bfloat16: its bits are read and widened.
_STORAGES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype("<u2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
# What is raised for content other than a state dict's. Operations that are not among ours raise KeyError.
_DAMAGE = (
    *(zipfile.BadZipFile, pickle.UnpicklingError, struct.error, OSError, EOFError, MemoryError, RuntimeError),
    *(ValueError, LookupError, TypeError, AttributeError),
)


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place in its storage; `offset` and `strides` in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Refused(Exception):
    """The reason why a file is not read."""


def read_pickled_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of a pickled state dict; its weights are not read. Raises InvalidModelFile, CacheError."""
    return _read_all(path, lambda tensor, read_storage: tensor.shape)


def read_pickled_tensors(path: Path) -> dict[str, np.ndarray]:
    """Array by name of a pickled state dict; bfloat16 becomes float32. Raises InvalidModelFile, CacheError."""
    return _read_all(path, _read)


def _read_all(path: Path, read: Callable[[StoredTensor, Callable[[str], bytes]], T]) -> dict[str, T]:
    """What `read` returns of each tensor, by name; one at a time, since files have several GB."""
    with reading(path):
        file = path.open("rb")
    try:
        with file, zipfile.ZipFile(file) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            for name, entry in entries.items():  # torch.save compresses nothing, so no entry is larger than the file
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                    raise _Refused(f"its entry {name!a} is compressed")
            (pickled,) = [name for name in entries if name.endswith("data.pkl")] or [""]
            if not pickled or entries[pickled].file_size > _MAX_PICKLE_BYTES:
                raise _Refused("it holds no pickle of usual size")
            root = pickled.removesuffix("data.pkl")
            if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
                raise _Refused("it is not little-endian")
            state = _StateReader(io.BytesIO(archive.read(pickled))).load()
            if not isinstance(state, dict) or not all(isinstance(each, StoredTensor) for each in state.values()):
                raise _Refused("it holds something else than a dictionary of tensors")
            _check_total(state.values(), sum(entry.file_size for entry in entries.values()))
            return {name: read(each, lambda key: archive.read(f"{root}data/{key}")) for name, each in state.items()}
    except _Refused as refusal:
        raise InvalidModelFile(f"{path} is not read: {refusal}.", hint=_HINT) from None
    except _DAMAGE as error:
        reason = "it is damaged, holds more than tensors, or was written by PyTorch before 1.6"
        raise InvalidModelFile(f"{path} is not read: {reason}.", hint=_HINT) from error


def _check_total(tensors: Iterable[StoredTensor], n_bytes: int) -> None:
    """Refuse tensors that together far exceed the file's size: all may share one storage."""
    total = sum(math.prod(each.shape) * _STORAGES[each.storage.kind].itemsize for each in tensors)
    if total > _MAX_SHARED * n_bytes:
        raise _Refused("its tensors are larger than the file")


def _read(tensor: StoredTensor, read_storage: Callable[[str], bytes]) -> np.ndarray:
    dtype = _STORAGES[tensor.storage.kind]
    flat = np.frombuffer(read_storage(tensor.storage.key), dtype)
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
    size = math.prod(tensor.shape)
    if size > len(flat) or (size and last >= len(flat)):
        raise _Refused("a tensor in it is larger than its storage")
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    found = np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)
    if tensor.storage.kind == "BFloat16Storage":
        return (found.astype(np.uint32, order="C") << 16).view(np.float32)
    return np.array(found, order="C")


_OPERATIONS = (  # that state dicts need; SETITEM, SETITEMS and BUILD are our own
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_DICT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL"),
    *("BINPERSID", "REDUCE"),
)


class _StateReader(pickle._Unpickler):
    """Python's reader of pickles, which is written in Python: its memo takes no more memory than the pickle's size."""

    dispatch = {  # noqa: RUF012 - as in the base
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPERATIONS)
    }

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return _make_dictionary
            case "torch._utils", "_rebuild_tensor_v2":
                return _make_tensor
            case "torch", _ if name in _STORAGES:
                return name
        raise _Refused(f"its pickle asks for {f'{module}.{name}'[:80]!a}, and nothing is run from a file")

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", str(kind), str(key), str(), int()) if kind in _STORAGES:
                return _Storage(kind, key)
        raise _Refused("a storage in it is not described as torch does")

    def _set_item(self: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _fill(self.stack[-1], [key, value])

    def _set_items(self: Any) -> None:
        taken = self.pop_mark()
        _fill(self.stack[-1], taken)

    def _drop_attributes(self: Any) -> None:
        """Drop the attributes of an OrderedDict, such as _metadata, which are not needed."""
        self.stack.pop()

    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items, pickle.BUILD[0]: _drop_attributes}


def _make_dictionary() -> dict[str, Any]:
    return {}


def _fill(place: Any, taken: list[Any]) -> None:
    """Put keys and values, which alternate in `taken`, into a dictionary.

    Only names are keys: to hash a deeply nested tuple would overflow the stack.
    """
    if not isinstance(place, dict) or not all(isinstance(key, str) for key in taken[::2]):
        raise _Refused("its pickle fills something else than a dictionary with names as keys")
    place.update(zip(taken[::2], taken[1::2], strict=True))


def _make_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise _Refused("a tensor in it is not described as torch does")
    if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
        raise _Refused("a tensor in it has no usual shape")
    if not all(type(each) is int and 0 <= each < 2**48 for each in (offset, *shape, *strides)):
        raise _Refused("a tensor in it has impossible sizes")
    return StoredTensor(storage, offset, shape, strides)
