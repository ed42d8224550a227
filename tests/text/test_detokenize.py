"""Streaming detokenization equals decoding all bytes at once, and waits no longer than it must."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.text.tokenizer import StreamDecoder, Tokenizer

Table = Callable[..., Tokenizer]

# Bytes near UTF-8's edges: leads, continuations, surrogates, overlong forms, and whole characters.
_edgy = st.lists(
    st.sampled_from([b"a", b"\x80", b"\xa0", b"\xbf", b"\xc0", b"\xc3", b"\xe0", b"\xe2\x82", b"\xed", b"\xf0\x9f"])
    | st.sampled_from([b"\xf4", b"\x90", b"\xf5", b"\xff", "é".encode(), "€".encode(), "🙂".encode()])
    | st.binary(max_size=5)
)


@given(_edgy)
@example([b"\xed", b"\xa0", b"\x80"])
@example([b"\xf0\x9f", b"\x99", b"\x82"])
def test_stream_equals_whole(table: Table, pieces: list[bytes]) -> None:
    decoder = StreamDecoder(table(pieces))
    texts = [decoder.push(4 + i) for i in range(len(pieces))]
    whole = getincrementaldecoder("utf-8")("replace")
    assert "".join(texts) == whole.decode(b"".join(pieces))
    assert decoder.holds_bytes == bool(whole.getstate()[0])


@given(st.text(), st.data())
def test_characters_are_whole_and_prompt(table: Table, text: str, data: st.DataObject) -> None:
    whole = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    decoder, shown, seen = StreamDecoder(table(pieces)), "", b""
    for i, piece in enumerate(pieces):
        shown += decoder.push(4 + i)
        seen += piece
        assert shown == seen.decode("utf-8", "ignore")  # every finished character, and no other


@given(st.sampled_from([b"\xe0\x80", b"\xf4\x90", b"\xc0", b"\xff", b"\x80", b"\xe2\x41"]))
def test_invalid_bytes_do_not_wait(table: Table, invalid: bytes) -> None:
    assert StreamDecoder(table([invalid])).push(4) == invalid.decode("utf-8", "replace")


def test_a_cut_character_is_shown_only_once_it_is_complete(table: Table) -> None:
    decoder = StreamDecoder(table([b"a\xf0\x9f\x99", b"\x82"]))
    assert decoder.push(4) == "a" and decoder.holds_bytes
    assert decoder.push(5) == "🙂" and not decoder.holds_bytes


def test_control_tokens_are_silent_unless_visible(table: Table) -> None:
    decoder = StreamDecoder(table([b"x", b"\xe2"]), visible=frozenset([2]))
    assert [decoder.push(t) for t in (3, 4, 2, 5, 2)] == ["", "x", "<think>", "", "\ufffd<think>"]
