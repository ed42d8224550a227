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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edgespec.errors import CacheError, InvalidModelFile

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
    try:
        file = path.open("rb")
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror or error}.", hint="Check the file.") from error
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
            return machine.pop()
        machine.step(operation.name, argument)
    raise _Refused("its pickle has no end")


class _Machine:
    """The stack and memo of a pickle that may only build plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self._stack:
            raise _Refused("its pickle takes from an empty stack")
        return self._stack.pop()

    def step(self, name: str, argument: Any) -> None:
        """Carry out one operation."""
        if name in _NUMBERS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._recall(argument))
        elif name in ("EMPTY_TUPLE", "EMPTY_DICT"):
            self._stack.append(() if name == "EMPTY_TUPLE" else {})
        elif name in _TUPLES:
            taken = [self.pop() for _ in range(_TUPLES[name])]
            self._stack.append(tuple(reversed(taken)))
        elif name == "MARK":
            self._below.append(self._stack)
            self._stack = []
        elif name == "TUPLE":
            marked = tuple(self._take_marked())
            self._stack.append(marked)
        elif name == "SETITEM":
            value, key = self.pop(), self.pop()
            self._set_items([key, value])
        elif name == "SETITEMS":
            self._set_items(self._take_marked())
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._stack.append(self._find_global(argument))
        elif name == "BINPERSID":
            self._stack.append(_make_storage(self.pop()))
        elif name == "REDUCE":
            arguments, function = self.pop(), self.pop()
            self._stack.append(_call(function, arguments))
        elif name == "BUILD":  # the attributes of an OrderedDict, such as _metadata, are not needed
            self.pop()
            if not isinstance(self._top(), dict):
                raise _Refused("its pickle sets attributes of something else than a dictionary")
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"its pickle uses the operation {name}, which no dictionary of tensors needs")

    def _top(self) -> Any:
        if not self._stack:
            raise _Refused("its pickle looks at an empty stack")
        return self._stack[-1]

    def _recall(self, index: int) -> Any:
        if index not in self._memo:
            raise _Refused("its pickle recalls what it has not stored")
        return self._memo[index]

    def _take_marked(self) -> list[Any]:
        if not self._below:
            raise _Refused("its pickle lacks a mark")
        taken, self._stack = self._stack, self._below.pop()
        return taken

    def _set_items(self, taken: list[Any]) -> None:
        place = self._top()
        if len(taken) % 2 or not isinstance(place, dict):
            raise _Refused("its pickle fills something else than a dictionary")
        for key, value in zip(taken[::2], taken[1::2], strict=True):
            if not isinstance(key, str):
                raise _Refused("a dictionary in it has keys that are no names")
            place[key] = value

    def _find_global(self, argument: str | None) -> _Global:
        """`argument` is 'module name', or None where both lie on the stack."""
        if argument is None:
            name, module = self.pop(), self.pop()
        else:
            module, _, name = argument.partition(" ")
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
    elements = math.prod(shape)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if elements > storage.elements or (elements and last >= storage.elements):
        raise _Refused("a tensor in it is larger than its storage")
    return StoredTensor(shape, strides, offset, storage.kind, storage.key)


def _check_state(state: Any, root: str, entries: Mapping[str, zipfile.ZipInfo]) -> dict[str, StoredTensor]:
    """The tensors of a state dict, with the entries of their storages, all of which must be there and large enough."""
    if not isinstance(state, dict) or not all(isinstance(each, StoredTensor) for each in state.values()):
        raise _Refused("it holds something else than a dictionary of tensors")
    return dict(_locate(state, root, entries))


def _locate(
    state: Mapping[str, StoredTensor], root: str, entries: Mapping[str, zipfile.ZipInfo]
) -> Iterator[tuple[str, StoredTensor]]:
    for name, tensor in state.items():
        entry = f"{root}data/{tensor.entry}"
        last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        needed = (last + 1) * _STORAGES[tensor.storage].itemsize if math.prod(tensor.shape) else 0
        if entry not in entries or entries[entry].file_size < needed:
            raise _Refused(f"the bytes of {name[:80]!a} are not all there")
        yield name, StoredTensor(tensor.shape, tensor.strides, tensor.offset, tensor.storage, entry)


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
