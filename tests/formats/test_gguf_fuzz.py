"""Mutations of a real header: whatever the bytes, either a header or InvalidModelFile, and soon."""

from __future__ import annotations

import struct
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf import Header, read_header
from edgespec.formats.gguf_validate import check_model, read_file
from edgespec.models.fit import estimate_memory
from edgespec.models.tokenizer_compat import find_tokenizer_mismatch
from tests.formats.ggufs import model_file
from tests.formats.test_gguf import Bytes

LIMIT_S = 2.0
INTERESTING = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@cache
def original() -> tuple[bytes, Header]:
    with TemporaryDirectory() as folder:
        path = model_file(Path(folder))
        return path.read_bytes(), read_file(path)


def survive(data: bytes) -> bool:
    """Parse and use `data`; True where it was accepted. Any other error, or a long wait, fails the test."""
    start = time.process_time()
    try:
        header = read_header(Bytes(data, len(data)), "fuzzed.gguf")
        check_model(header)
        estimate_memory(header, 2048)
        find_tokenizer_mismatch(original()[1], header)
        accepted = True
    except InvalidModelFile as error:
        accepted = False
        assert error.message.startswith("'fuzzed.gguf' ")
        assert len(error.message) < 70_000
    assert time.process_time() - start < LIMIT_S
    return accepted


def test_the_unchanged_file_is_accepted() -> None:
    assert survive(original()[0])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    assert not survive(data)
    assert not survive(b"GGUF\x03\x00\x00\x00" + data)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_flipped_bits(data: st.DataObject) -> None:
    content = bytearray(original()[0])
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, original()[1].data_offset - 1))] ^= 1 << data.draw(st.integers(0, 7))
    survive(bytes(content))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_overwritten_numbers(data: st.DataObject) -> None:
    content = bytearray(original()[0])
    width = data.draw(st.sampled_from(["<I", "<Q"]))
    number = data.draw(st.sampled_from(INTERESTING) | st.integers(0, 2**64 - 1))
    # The first kilobyte holds the counts and the numbers; after it come strings with their lengths.
    at = data.draw(st.integers(4, 1024) | st.integers(4, original()[1].data_offset - 8))
    struct.pack_into(width, content, at, number % 2 ** (8 * struct.calcsize(width)))
    survive(bytes(content))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_cut_spliced_and_repeated(data: st.DataObject) -> None:
    content, header = original()
    first = data.draw(st.integers(0, header.data_offset))
    second = data.draw(st.integers(0, header.data_offset))
    assert not survive(content[: min(first, header.data_offset - 1)])
    survive(content[:first] + content[second:])
    survive(content[:first] + data.draw(st.binary(max_size=32)) + content[first:])
