"""Pickled weights: what torch.save writes is read, anything else is refused, and nothing is run."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import CacheError, InvalidModelFile
from edgespec.formats.torch_pickle import read_pickled_shapes, read_pickled_tensors
from tests.formats.head_files import Storage, call, make_pickle, stored, write_state, write_torch

FLOATS = np.arange(6, dtype="<f4")


def file_of(tmp_path: Path, state: object, data: dict[str, bytes] | None = None, **options: Any) -> Path:
    return write_torch(
        tmp_path / "w.pt", make_pickle(state), {"0": FLOATS.tobytes()} if data is None else data, **options
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_torch(tmp_path: Path, protocol: int) -> None:
    state = OrderedDict(a=stored("FloatStorage", "0", 6, (2, 3), (3, 1)))
    path = write_torch(tmp_path / "w.pt", make_pickle(state, protocol), {"0": FLOATS.tobytes()})
    assert read_pickled_shapes(path) == {"a": (2, 3)}
    assert (read_pickled_tensors(path)["a"] == FLOATS.reshape(2, 3)).all()


def test_views_share_a_storage(tmp_path: Path) -> None:
    state = {
        "turned": stored("FloatStorage", "0", 6, (3, 2), (1, 3)),
        "end": stored("FloatStorage", "0", 6, (2,), (1,), 4),
        "number": stored("FloatStorage", "0", 6, (), (), 5),
        "empty": stored("FloatStorage", "0", 6, (0, 3), (3, 1)),
    }
    read = read_pickled_tensors(file_of(tmp_path, state))
    assert (read["turned"] == FLOATS.reshape(2, 3).T).all() and read["turned"].flags.c_contiguous
    assert read["end"].tolist() == [4, 5] and read["number"].shape == () and read["number"] == 5
    assert read["empty"].shape == (0, 3)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("HalfStorage", np.array([1.5, -2], "<f2")),
        ("DoubleStorage", np.array([1.5, -2], "<f8")),
        ("LongStorage", np.array([2**40, -2], "<i8")),
        ("IntStorage", np.array([7, -2], "<i4")),
        ("BoolStorage", np.array([True, False])),
    ],
)
def test_element_types(tmp_path: Path, kind: str, values: np.ndarray) -> None:
    read = read_pickled_tensors(file_of(tmp_path, {"a": stored(kind, "0", 2, (2,), (1,))}, {"0": values.tobytes()}))
    assert read["a"].dtype == values.dtype and read["a"].tolist() == values.tolist()


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3e38, 1e-30], np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2")
    read = read_pickled_tensors(
        file_of(tmp_path, {"a": stored("BFloat16Storage", "0", 4, (4,), (1,))}, {"0": bits.tobytes()})
    )
    assert read["a"].dtype == np.float32
    assert np.allclose(read["a"], values, rtol=2**-7, atol=0)


def test_attributes_of_the_dictionary_are_left_out(tmp_path: Path) -> None:
    assert read_pickled_shapes(write_state(tmp_path / "w.bin", {"a.weight": (4, 2)})) == {"a.weight": (4, 2)}


class Marker:
    """Writes a file if it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.place}",)


def hostile(place: Path) -> dict[str, bytes]:
    command = f"touch {place}"
    tensor = stored("FloatStorage", "0", 6, (2, 3), (3, 1))
    return {
        "system": pickle.dumps(Marker(place), 2),
        "system in a value": make_pickle({"a": call("os", "system", command)}),
        "eval": make_pickle({"a": call("builtins", "eval", f"open({str(place)!r}, 'w')")}),
        "python 2 names": make_pickle(call("__builtin__", "eval", f"open({str(place)!r}, 'w')")),
        "nested name": make_pickle({"a": call("torch", "serialization.os.system", command)}),
        "dotted name on the stack": pickle.PROTO
        + b"\x04"
        + b"\x8c\x05torch\x8c\x11_utils.os.systemX"
        + pickle.STACK_GLOBAL,
        "getattr": make_pickle({"a": call("builtins", "getattr", call("builtins", "__import__", "os"), "system")}),
        "another function of torch": make_pickle({"a": call("torch", "load", "x.pt")}),
        "an allowed function on other things": make_pickle(
            {"a": call("torch._utils", "_rebuild_tensor_v2", "x", 1, 2)}
        ),
        "a storage called": make_pickle({"a": call("torch", "FloatStorage", 6)}),
        "a filled OrderedDict": make_pickle({"a": call("collections", "OrderedDict", (("x", 1),))}),
        "attributes of a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb.",
        "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + command.encode() + b"'\no.",
        "NEWOBJ": b"\x80\x02cos\nsystem\n)\x81.",
        "EXT1": b"\x80\x02\x82\x01.",
        "a large memo": b"\x80\x02}r\xff\xff\xff\xffh\x00.",
        "a large string": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.",
        "a large number": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"a.",
        "nothing": b"",
        "an empty stack": b"\x80\x02.",
        "a lone mark": b"\x80\x02u.",
        "no end": make_pickle({"a": tensor})[:-1],
        "another value": make_pickle({"a": 3}),
        "a tensor alone": make_pickle(tensor),
        "keys that are numbers": make_pickle({1: tensor}),
        "a huge shape": make_pickle({"a": stored("FloatStorage", "0", 2**60, (2**30, 2**30), (2**30, 1))}),
        "a shape repeated by strides": make_pickle({"a": stored("FloatStorage", "0", 6, (2**40,), (0,))}),
        "a negative offset": make_pickle({"a": stored("FloatStorage", "0", 6, (2,), (1,), -1)}),
        "a negative stride": make_pickle({"a": stored("FloatStorage", "0", 6, (2,), (-1,), 3)}),
        "past the end": make_pickle({"a": stored("FloatStorage", "0", 6, (2,), (1,), 5)}),
        "more than the entry holds": make_pickle({"a": stored("FloatStorage", "0", 7, (7,), (1,))}),
        "an absent entry": make_pickle({"a": stored("FloatStorage", "9", 6, (2,), (1,))}),
        "an entry elsewhere": make_pickle({"a": stored("FloatStorage", "../../etc/passwd", 6, (2,), (1,))}),
        "sizes that are no numbers": make_pickle({"a": stored("FloatStorage", "0", 6, ("x",), (1,))}),
        "an unknown storage": make_pickle({"a": stored("ComplexFloatStorage", "0", 2, (2,), (1,))}),
        "a storage alone": make_pickle({"a": Storage("FloatStorage", "0", 6)}),
    }


def test_tensors_that_share_a_storage_have_little_more_than_the_file(tmp_path: Path) -> None:
    """A hundred kilobytes of a pickle could name tensors of many gigabytes."""
    shared = {f"t{i}": stored("FloatStorage", "0", 4000, (4000,), (1,)) for i in range(1000)}
    path = write_torch(tmp_path / "w.pt", make_pickle(shared), {"0": bytes(16_000)})
    with pytest.raises(InvalidModelFile, match="its tensors are larger than the file"):
        read_pickled_tensors(path)
    path = write_torch(tmp_path / "v.pt", make_pickle(dict(list(shared.items())[:2])), {"0": bytes(16_000)})
    assert len(read_pickled_tensors(path)) == 2


@pytest.mark.parametrize("name", hostile(Path("place")))
def test_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    place = tmp_path / "executed"
    path = write_torch(tmp_path / "w.pt", hostile(place)[name], {"0": FLOATS.tobytes()})
    with pytest.raises(InvalidModelFile, match="is not read: ") as caught:
        read_pickled_tensors(path)
    assert not place.exists()
    assert caught.value.message.startswith(str(path)) and caught.value.message.count(". ") == 0 and caught.value.hint


def test_the_marker_would_run(tmp_path: Path) -> None:
    """The hostile pickle does what it says where nothing holds it back."""
    place = tmp_path / "executed"
    pickle.loads(hostile(place)["system"])
    assert place.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"compression": zipfile.ZIP_DEFLATED}, "compressed"), ({"order": "big"}, "little-endian")],
)
def test_zips_that_torch_does_not_write(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModelFile, match=message):
        read_pickled_shapes(file_of(tmp_path, {"a": stored("FloatStorage", "0", 6, (2, 3), (3, 1))}, **options))


def test_files_that_are_no_zips(tmp_path: Path) -> None:
    old = tmp_path / "old.bin"
    old.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps({"a": 1}, 2))
    with pytest.raises(InvalidModelFile, match=r"PyTorch before 1\.6"):
        read_pickled_shapes(old)
    with zipfile.ZipFile(tmp_path / "no.pt", "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(InvalidModelFile, match="no pickle"):
        read_pickled_shapes(tmp_path / "no.pt")
    with pytest.raises(CacheError, match="cannot be read"):
        read_pickled_shapes(tmp_path / "absent.pt")


with TemporaryDirectory() as _name:
    WHOLE = write_state(Path(_name) / "w.pt", {"0.0.linear.weight": (8, 8), "0.0.linear.bias": (8,)}).read_bytes()


def survive(path: Path) -> None:
    """The file reads with the shapes of the original or others, or is refused."""
    try:
        read_pickled_tensors(path)
    except InvalidModelFile as error:
        assert error.message.startswith(str(path))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_flipped_bits(scratch: Path, data: st.DataObject) -> None:
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = scratch / "w.pt"
    path.write_bytes(content)
    survive(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bits_of_the_pickle(scratch: Path, data: st.DataObject) -> None:
    """Inside a zip whose checksums are right."""
    state = OrderedDict(a=stored("FloatStorage", "0", 6, (2, 3), (3, 1)))
    content = bytearray(make_pickle(state))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    survive(write_torch(scratch / "w.pt", bytes(content), {"0": FLOATS.tobytes()}))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(WHOLE) - 1))
def test_cut_anywhere(scratch: Path, length: int) -> None:
    path = scratch / "w.pt"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(InvalidModelFile):
        read_pickled_tensors(path)
