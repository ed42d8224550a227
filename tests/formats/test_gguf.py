"""GGUF headers: real files, each kind of damage, and large vocabularies."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.errors import CacheError, InvalidModelFile
from edgespec.formats.ggml_types import GGML_TYPES
from edgespec.formats.gguf import Header, read_header
from edgespec.formats.gguf_validate import check_model, read_file
from tests.formats.ggufs import model_file


@dataclass(frozen=True)
class Bytes:
    """A header in memory, in a file that claims `size` bytes; counts what is read."""

    data: bytes
    size: int

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def parse(data: bytes, size: int | None = None) -> Header:
    header = read_header(Bytes(data, len(data) if size is None else size), "m.gguf")
    check_model(header)
    return header


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def u32(key: str, number: int) -> bytes:
    return pair(key, 4, struct.pack("<I", number))


def strings(key: str, values: list[str]) -> bytes:
    return pair(key, 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values)))


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


GOOD_PAIRS = [
    pair("general.architecture", 8, text("llama")),
    u32("llama.block_count", 1),
    u32("llama.embedding_length", 8),
    u32("llama.context_length", 16),
    strings("tokenizer.ggml.tokens", ["a", "b"]),
]
GOOD_TENSORS = [tensor("x", (8, 2), 0, 0), tensor("y", (8,), 0, 64)]


def build(pairs: list[bytes] = GOOD_PAIRS, tensors: list[bytes] = GOOD_TENSORS, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(96)


def with_pair(extra: bytes) -> bytes:
    return build([*GOOD_PAIRS, extra])


def without(key: str) -> bytes:
    return build([each for each in GOOD_PAIRS if key.encode() not in each])


@pytest.mark.parametrize("name", ["draft", "target"])
def test_a_real_file_reads_like_the_gguf_package_reads_it(tmp_path: Path, name: str) -> None:
    path = model_file(tmp_path, name)
    header, reader = read_file(path), gguf.GGUFReader(path)
    assert header.data_offset == reader.data_offset
    assert [(t.name, t.shape, t.nbytes) for t in header.tensors] == [
        (t.name, tuple(int(n) for n in t.shape), t.n_bytes) for t in reader.tensors
    ]
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        mine, other = header.metadata[key], field.contents()
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == other, key


@pytest.mark.parametrize("version", [2, 3])
def test_the_smallest_valid_file_is_read(version: int) -> None:
    header = parse(build(version=version))
    assert (header.architecture, header.weight_bytes) == ("llama", 96)


def test_type_sizes_are_those_of_the_gguf_package() -> None:
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # that package counts f32 scales; ggml-common.h has two halves (36 bytes)
            mine = GGML_TYPES[int(kind)]
            assert (mine.name, mine.block_items, mine.block_bytes) == (kind.name, *sizes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file: it is empty"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file: it starts with 'PK\\x03\\x04'"),
        (b"<htm" + bytes(60), "not a GGUF file: it starts with '<htm'"),
        (b"GG", "not a GGUF file: it starts with 'GG'"),
        (b"GGUF\x03\x00", "cut short"),
        (build(version=1), "GGUF version 1"),
        (build(version=77), "GGUF version 77"),
        (b"GGUF\x00\x00\x00\x03" + bytes(60), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1) + bytes(99), "tensor count promises"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**63) + bytes(99), "metadata count promises"),
        (with_pair(text(b"\xff\xfe") + struct.pack("<IB", 7, 1)), "not UTF-8"),
        (with_pair(pair("", 7, b"\1")), "is empty"),
        (with_pair(pair("k", 13, b"")), "unknown value type 13"),
        (with_pair(pair("k", 9, struct.pack("<IQ", 9, 1))), "array of arrays"),
        (with_pair(pair("k", 9, struct.pack("<IQ", 99, 1))), "array of the unknown value type 99"),
        (with_pair(pair("k", 9, struct.pack("<IQ", 8, 2**62))), "promises"),
        (with_pair(pair("k", 9, struct.pack("<IQ", 5, 2**62))), "promises"),
        (with_pair(pair("k", 8, struct.pack("<Q", 2**64 - 1))), "promises"),
        (with_pair(GOOD_PAIRS[1]), "comes twice"),
        (with_pair(u32("general.alignment", 24)), "power of two"),
        (with_pair(u32("general.alignment", 0)), "power of two"),
        (without("general.architecture"), "names no architecture"),
        (without("block_count"), "block_count is missing"),
        (build([GOOD_PAIRS[0], u32("llama.block_count", 0), *GOOD_PAIRS[2:]]), "block_count is 0"),
        (build([GOOD_PAIRS[0], u32("llama.block_count", 2**31), *GOOD_PAIRS[2:]]), "block_count is 2147483648"),
        (build([GOOD_PAIRS[0], pair("llama.block_count", 8, text("2")), *GOOD_PAIRS[2:]]), "not a whole number"),
        (without("embedding_length"), "embedding_length is missing"),
        (without("tokenizer.ggml.tokens"), "no vocabulary"),
        (
            with_pair(pair("tokenizer.ggml.scores", 9, struct.pack("<IQf", 6, 1, 0.5))),
            "scores does not have one number for each of 2 tokens",
        ),
        (build(tensors=[]), "no tensors"),
        (build(tensors=[GOOD_TENSORS[0], tensor("x", (8,), 0, 64)]), "comes twice"),
        (build(tensors=[tensor("x", (8,), 4, 0)]), "unknown element type 4"),
        (build(tensors=[tensor("x", (8,), 2, 0)]), "not whole blocks of Q4_0"),
        (build(tensors=[tensor("x", (8,), 0, 7)]), "is not aligned"),
        (build(tensors=[tensor("x", (8,), 0, 32)]), "not where the one before it ends"),
        (build(tensors=[GOOD_TENSORS[0], tensor("y", (8,), 0, 32)]), "not where the one before it ends"),
        (build(tensors=[tensor("x", (2**40, 2**40), 0, 0)]), "impossible shape"),
        (build(tensors=[tensor("x", (8, 0), 0, 0)]), "impossible shape"),
        (build(tensors=[tensor("x", (1,) * 5, 0, 0)]), "has 5 dimensions"),
        (build(tensors=[tensor("x" * 64, (8,), 0, 0)]), "longer than 63 bytes"),
        (build()[:-40], "cut short: the header promises"),
        (build(tensors=[tensor("x", (2**20,), 0, 0)]), "cut short: the header promises 4,194,592 bytes"),
    ],
)
def test_each_kind_of_damage_has_a_message(data: bytes, message: str) -> None:
    with pytest.raises(InvalidModelFile) as caught:
        parse(data)
    assert message in caught.value.message
    assert caught.value.message.startswith("'m.gguf' ") and caught.value.hint


def test_a_length_that_swallows_the_weights_stops_at_the_header_limit() -> None:
    """A key claims 1 GiB inside a file that claims 64 GiB: refused before it is read."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + pair("k", 8, struct.pack("<Q", 2**30))
    with pytest.raises(InvalidModelFile, match="past 256 MiB"):
        parse(data + bytes(2**20), size=2**36)


def test_large_vocabularies_are_read_whole() -> None:
    count = 150_000
    names = [f"▁token{number}" for number in range(count)]
    merges = strings("tokenizer.ggml.merges", [f"{number} ö" for number in range(count)])
    scores = pair("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, count) + bytes(4 * count))
    data = build([*GOOD_PAIRS[:4], strings("tokenizer.ggml.tokens", names), merges, scores])
    assert parse(data).metadata["tokenizer.ggml.tokens"] == names


def test_bytes_that_are_no_text_stay_distinct_tokens() -> None:
    raw = pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text(b"\xff") + text(b"\xfe"))
    tokens = parse(build([*GOOD_PAIRS[:4], raw])).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list) and tokens[0] != tokens[1]


def test_a_missing_file_is_no_model_error(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="cannot be read"):
        read_file(tmp_path / "absent.gguf")
