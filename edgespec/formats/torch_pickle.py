"""Tensors of a file written by torch.save (.pt, .bin), read without running anything from it.

The file is a zip with a pickle, which is a program, and one entry of raw bytes a storage. The pickle's operations are
listed by pickletools, which runs none of them, and carried out here: they can build numbers, texts, tuples,
dictionaries and descriptions of tensors, and nothing else. Whatever asks for more raises InvalidModelFile.
"""

from __future__ import annotations

import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edgespec.errors import InvalidModelFile, reading

T = TypeVar("T")
_MAX_PICKLE_BYTES = 2**20  # a thousand tensors take about 150 kB
_MAX_DIMENSIONS = 8
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
_GLOBALS = {("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2")} | {
    ("torch", storage) for storage in _STORAGES
}
_DAMAGE = (zipfile.BadZipFile, struct.error, OSError, ValueError, LookupError, EOFError, RuntimeError, MemoryError)
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True)
class _Global:
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    key: str
    elements: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place: `offset` and `strides` in elements of its storage, whose bytes are the entry `entry`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: str
    entry: str

    @property
    def last(self) -> int:
        """The last element of the storage that belongs to the tensor, if that has any."""
        return self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))


class _Refused(Exception):
    """The reason why a file is not read."""


def read_pickled_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of a pickled state dict; its weights are not read. Raises InvalidModelFile, CacheError."""
    return _read_all(path, lambda archive, tensor: tensor.shape)


def read_pickled_tensors(path: Path) -> dict[str, np.ndarray]:
    """Array by name of a pickled state dict; bfloat16 becomes float32. Raises InvalidModelFile, CacheError."""
    return _read_all(path, lambda archive, tensor: _read(tensor, archive.read(tensor.entry)))


def _read_all(path: Path, read: Callable[[zipfile.ZipFile, StoredTensor], T]) -> dict[str, T]:
    """What `read` returns of each tensor, by name; one at a time, since files have several GB."""
    with reading(path):
        file = path.open("rb")
    try:
        with file, zipfile.ZipFile(file) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            _check_entries(entries)
            (pickled,) = [name for name in entries if name.endswith("data.pkl")] or [""]
            if not pickled or entries[pickled].file_size > _MAX_PICKLE_BYTES:
                raise _Refused("it holds no pickle of usual size")
            root = pickled.removesuffix("data.pkl")
            order = f"{root}byteorder"
            if order in entries and archive.read(order) != b"little":
                raise _Refused("it is not little-endian")
            tensors = _check_state(_run(archive.read(pickled)), root, entries)
            return {name: read(archive, tensor) for name, tensor in tensors.items()}
    except _Refused as refusal:
        raise InvalidModelFile(f"{path} is not read: {refusal}.", hint=_HINT) from None
    except _DAMAGE as error:
        reason = "it is damaged, or written by PyTorch before 1.6"
        raise InvalidModelFile(f"{path} is not read: {reason}.", hint=_HINT) from error


def _check_entries(entries: Mapping[str, zipfile.ZipInfo]) -> None:
    """torch.save compresses nothing, so no entry is larger than the file."""
    for name, entry in entries.items():
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise _Refused(f"its entry {name!a} is compressed")


def _run(pickled: bytes) -> Any:
    """What the pickle builds. Raises _Refused for an operation or a name that no state dict needs."""
    machine = _Machine()
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "STOP":
            return machine.stack.pop()
        machine.step(operation.name, argument)
    raise _Refused("its pickle has no end")


class _Machine:
    """The stack and memo of a pickle that may only build plain values.

    A pickle that takes what it has not stored raises LookupError.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carry out one operation."""
        stack = self.stack
        if name in _NUMBERS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("EMPTY_TUPLE", "EMPTY_DICT"):
            stack.append(() if name == "EMPTY_TUPLE" else {})
        elif name in _TUPLES:
            taken = [stack.pop() for _ in range(_TUPLES[name])]
            stack.append(tuple(reversed(taken)))
        elif name == "MARK":
            self._below.append(stack)
            self.stack = []
        elif name == "TUPLE":
            self.stack = self._below.pop()
            self.stack.append(tuple(stack))
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set_items(stack[-1], [key, value])
        elif name == "SETITEMS":
            self.stack = self._below.pop()
            _set_items(self.stack[-1], stack)
        elif name == "GLOBAL":
            stack.append(_find_global(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            text, module = stack.pop(), stack.pop()
            stack.append(_find_global(module, text))
        elif name == "BINPERSID":
            stack.append(_make_storage(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        elif name == "BUILD":  # the attributes of an OrderedDict, such as _metadata, are not needed
            stack.pop()
            if not isinstance(stack[-1], dict):
                raise _Refused("its pickle sets attributes of something else than a dictionary")
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"its pickle uses the operation {name}, which no dictionary of tensors needs")


def _set_items(place: Any, taken: list[Any]) -> None:
    """Fill a dictionary. Only names are keys: to hash a deeply nested tuple would overflow the stack."""
    if len(taken) % 2 or not isinstance(place, dict):
        raise _Refused("its pickle fills something else than a dictionary")
    for key, value in zip(taken[::2], taken[1::2], strict=True):
        if not isinstance(key, str):
            raise _Refused("a dictionary in it has keys that are no names")
        place[key] = value


def _find_global(module: Any, name: Any) -> _Global:
    if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in _GLOBALS:
        raise _Refused(f"its pickle asks for {f'{module}.{name}'[:80]!a}, and nothing is run from a file")
    return _Global(module, name)


def _make_storage(reference: Any) -> _Storage:
    match reference:
        case ("storage", _Global("torch", kind), str(key), str(), int(elements)) if kind in _STORAGES:
            if elements >= 0 and not isinstance(elements, bool):
                return _Storage(kind, key, elements)
    raise _Refused("a storage in it is not described as torch does")


def _call(function: Any, arguments: Any) -> Any:
    match function, arguments:
        case _Global("collections", "OrderedDict"), ():
            return {}
        case _Global("torch._utils", "_rebuild_tensor_v2"), (_Storage() as storage, offset, shape, strides, *_):
            return _make_tensor(storage, offset, shape, strides)
    raise _Refused("its pickle calls something else than a dictionary or a tensor")


def _make_tensor(storage: _Storage, offset: Any, shape: Any, strides: Any) -> StoredTensor:
    numbers = [offset, *shape, *strides] if isinstance(shape, tuple) and isinstance(strides, tuple) else []
    if not numbers or len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
        raise _Refused("a tensor in it has no usual shape")
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**48 for each in numbers):
        raise _Refused("a tensor in it has impossible sizes")
    elements, tensor = math.prod(shape), StoredTensor(shape, strides, offset, storage.kind, storage.key)
    if elements > storage.elements or (elements and tensor.last >= storage.elements):
        raise _Refused("a tensor in it is larger than its storage")
    return tensor


def _check_state(state: Any, root: str, entries: Mapping[str, zipfile.ZipInfo]) -> dict[str, StoredTensor]:
    """The tensors of a state dict, with the entries of their storages, all of which must be there and large enough."""
    if not isinstance(state, dict) or not all(isinstance(each, StoredTensor) for each in state.values()):
        raise _Refused("it holds something else than a dictionary of tensors")
    found = {name: replace(tensor, entry=f"{root}data/{tensor.entry}") for name, tensor in state.items()}
    for name, tensor in found.items():
        needed = (tensor.last + 1) * _STORAGES[tensor.storage].itemsize if math.prod(tensor.shape) else 0
        if tensor.entry not in entries or entries[tensor.entry].file_size < needed:
            raise _Refused(f"the bytes of {name[:80]!a} are not all there")
    return found


def _read(tensor: StoredTensor, data: bytes) -> np.ndarray:
    dtype = _STORAGES[tensor.storage]
    if not math.prod(tensor.shape):
        return np.zeros(tensor.shape, np.float32 if tensor.storage == "BFloat16Storage" else dtype)
    flat = np.frombuffer(data, dtype, count=len(data) // dtype.itemsize)[tensor.offset :]
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    found = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
    if tensor.storage == "BFloat16Storage":
        return (found.astype(np.uint32, order="C") << 16).view(np.float32)
    return np.array(found, order="C")
