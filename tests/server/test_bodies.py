"""Bodies: bounds that hold outside of strings only, and threads for large ones."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import InvalidRequest
from edgespec.server import fields
from edgespec.server.fields import compute, parse_body
from edgespec.server.openai import ChatRequest

HEAD = b'{"messages": [{"role": "user", "content": "hi"}], "more": '
VALUES = st.recursive(
    st.none() | st.integers() | st.text('a"\\,[{:]é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a"\\,'), inner),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (b"[" + b"[]," * 2**17 + b"0]", "131,072 arrays, objects and keys"),
        (b'["",' + b'{"a":' * 2**17, "131,072 arrays, objects and keys"),
        (b"[" + b'"",' * (2**20 + 1) + b"0]", "1,048,576 values"),
        (b"[" + b'"\\"",' * (2**20 + 1) + b"0]", "1,048,576 values"),
    ],
    ids=["arrays", "keys", "strings", "quotes"],
)
def test_too_many(more: bytes, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the body has more than {name}"):
        parse_body(HEAD + more + b"}", ChatRequest)


def test_the_text_of_strings_has_no_such_bounds() -> None:
    text = 'def f(a, b): return {a: ["x", \'\\\\"\']}\n' * 60_000
    for ascii_only in (True, False):
        body = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=ascii_only).encode()
        assert parse_body(body, ChatRequest).messages[0].content == text


@given(value=VALUES, size=st.integers(1, 9))
@settings(deadline=None)
def test_strings_are_split_off(value: object, size: int) -> None:
    """Against a reader of single characters, in steps that end anywhere."""
    data, left, is_inside, is_escaped = json.dumps(value, ensure_ascii=False).encode(), bytearray(), False, False
    for byte in data:
        if is_escaped:
            is_escaped = False
        elif byte == ord('"'):
            is_inside = not is_inside
        elif not is_inside:
            left.append(byte)
        else:
            is_escaped = byte == ord("\\")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "_CHUNK", size)
        assert b"".join(fields._split_strings_off(data)) == left


def test_only_large_bodies_are_read_on_another_thread() -> None:
    here = threading.get_ident()
    assert asyncio.run(compute(100, threading.get_ident)) == here
    assert asyncio.run(compute(100_000, threading.get_ident)) != here
