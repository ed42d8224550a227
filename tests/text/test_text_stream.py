"""Tokens to pieces: decoding, reasoning, stop strings and origins together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.text.reasoning import detect_format
from edgespec.text.stops import StopStrings
from edgespec.text.stream import Piece, TextStream
from edgespec.text.tokenizer import Tokenizer

Table = Callable[..., Tokenizer]
THINK = detect_format("<think>{{ m.thinking }}</think>")
LETTERS = [b"a", b"b", b"c", "é".encode()[:1], "é".encode()[1:], *(bytes([c]) for c in b"<think>/ ")]
BOS, EOG, OPEN, CLOSE, A, B, C = range(7)


def run(stream: TextStream, tokens: list[tuple[int, bool]]) -> list[Piece]:
    pieces = [piece for token, drafted in tokens for piece in stream.push(token, drafted)]
    return pieces + stream.finish()


def text(pieces: list[Piece], channel: str) -> str:
    return "".join(p.text for p in pieces if p.channel == channel)


def chars(pieces: list[Piece]) -> list[tuple[str, str, bool]]:
    return [(char, piece.channel, piece.drafted) for piece in pieces for char in piece.text]


_tokens = st.lists(st.tuples(st.integers(A, C), st.booleans()), max_size=20)
_stops = st.lists(st.text("abc", min_size=1, max_size=3), max_size=3)


@given(_tokens, _tokens, _stops)
@example([], [(A, True), (B, False), (A, True)], ["ab", "bc"])
@example([(A, True)], [(A, True), (B, False)], ["abc"])
def test_channels_stops_and_origins(
    table: Table, thought: list[tuple[int, bool]], answer: list[tuple[int, bool]], stops: list[str]
) -> None:
    """Each character shown keeps the origin of its token, however long it was held back."""
    tokenizer = table(LETTERS)
    stream = TextStream(tokenizer, stops, THINK)
    pieces = run(stream, [(OPEN, True), *thought, (CLOSE, False), *answer])
    expected = [(tokenizer.piece(t).decode(), "reasoning", drafted) for t, drafted in thought]
    spoken = [(tokenizer.piece(t).decode(), "answer", drafted) for t, drafted in answer]
    search = StopStrings(stops)
    kept = search.push("".join(c for c, _, _ in spoken)).text + search.finish().text
    assert chars(pieces) == expected + spoken[: len(kept)]
    assert stream.stopped == search.finish().stopped
    assert stream.stop == search.finish().stop


@given(st.lists(st.tuples(st.integers(A, len(LETTERS) + 3), st.booleans()), max_size=25), st.booleans())
def test_pieces_do_not_depend_on_origin(table: Table, tokens: list[tuple[int, bool]], inside: bool) -> None:
    tail = "<think>\n" if inside else ""
    tokenizer = table(LETTERS)
    pieces = run(TextStream(tokenizer, ["abc"], THINK, tail), tokens)
    plain = run(TextStream(tokenizer, ["abc"], THINK, tail), [(t, False) for t, _ in tokens])
    for channel in ("answer", "reasoning"):
        assert text(pieces, channel) == text(plain, channel)
    assert all(p.text for p in pieces)


def test_held_text_keeps_its_origin(table: Table) -> None:
    stream = TextStream(table(LETTERS), ["abc"])
    assert stream.push(A, True) == []
    assert stream.push(B, False) == []
    assert stream.push(A, True) == [Piece("a", "answer", True), Piece("b", "answer", False)]
    assert stream.finish() == [Piece("a", "answer", True)]


def test_one_piece_per_run_of_one_origin(table: Table) -> None:
    stream = TextStream(table(LETTERS), ["aabb"])
    held = [stream.push(t, True) for t in (A, A, B)]
    assert held == [[], [], []]
    assert stream.push(C, True) == [Piece("aabc", "answer", True)]


def test_control_markers_are_read_and_not_shown(table: Table) -> None:
    stream = TextStream(table(LETTERS), [], THINK)
    pieces = run(stream, [(OPEN, False), (A, True), (CLOSE, False), (B, True), (OPEN, False)])
    assert pieces[:2] == [Piece("a", "reasoning", True), Piece("b", "answer", True)]


def test_control_tokens_without_a_format_are_silent(table: Table) -> None:
    assert run(TextStream(table(LETTERS)), [(OPEN, False), (A, False)]) == [Piece("a", "answer", False)]


def test_prompt_that_opened_the_block(table: Table) -> None:
    stream = TextStream(table(LETTERS), [], THINK, prompt_tail="assistant\n<think>\n")
    assert stream.push(A, False) == [Piece("a", "reasoning", False)]


def test_stop_strings_spare_the_reasoning(table: Table) -> None:
    stream = TextStream(table(LETTERS), ["b"], THINK)
    pieces = run(stream, [(OPEN, False), (A, False), (B, False), (CLOSE, False), (A, False), (B, False), (C, False)])
    assert (text(pieces, "reasoning"), text(pieces, "answer")) == ("ab", "a")
    assert stream.stop == "b"


def test_stop_string_does_not_reach_across_reasoning(table: Table) -> None:
    form = detect_format("[THINK][/THINK]")
    tokenizer = table([*LETTERS, b"[THINK]", b"[/THINK]"])
    first, last = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    stream = TextStream(tokenizer, ["ab"], form)
    pieces = run(stream, [(A, True), (first, False), (C, False), (last, False), (B, False)])
    assert pieces == [Piece("a", "answer", True), Piece("c", "reasoning", False), Piece("b", "answer", False)]
    assert not stream.stopped


def test_end_of_generation_has_no_text(table: Table) -> None:
    assert run(TextStream(table(LETTERS)), [(A, False), (EOG, True)]) == [Piece("a", "answer", False)]
    assert run(TextStream(table(LETTERS, end=B)), [(A, False), (B, True)]) == [Piece("a", "answer", False)]


def test_cut_character_belongs_to_the_last_token(table: Table) -> None:
    stream = TextStream(table(LETTERS))
    assert run(stream, [(A, False), (7, True)]) == [Piece("a", "answer", False), Piece("\ufffd", "answer", True)]
    assert run(TextStream(table(LETTERS)), [(7, False), (8, True)]) == [Piece("é", "answer", True)]


@given(st.text(), st.lists(st.booleans(), min_size=1))
def test_real_vocabulary(trained: Tokenizer, written: str, origins: list[bool]) -> None:
    written = written.encode("utf-8", "replace").decode()
    tokens = trained.encode(written, parse_special=False)
    flagged = [(t, origins[i % len(origins)]) for i, t in enumerate(tokens)]
    pieces = run(TextStream(trained, ["STOP HERE"]), flagged)
    assert text(pieces, "answer") == written
    for (_, ours), token_run in zip(_groups(chars(pieces)), _token_groups(trained, flagged), strict=False):
        assert ours == token_run


def _groups(characters: list[tuple[str, str, bool]]) -> list[tuple[bool, str]]:
    return [(flag, "".join(c for c, _, _ in group)) for flag, group in groupby(characters, key=lambda c: c[2])]


def _token_groups(tokenizer: Tokenizer, flagged: list[tuple[int, bool]]) -> list[str]:
    """Texts of runs of one origin; a character belongs to the token with its last byte."""
    data, marks = b"", []
    for token, drafted in flagged:
        piece = tokenizer.piece(token)
        data += piece
        marks += [drafted] * len(piece)
    position, out = 0, []
    for char in data.decode():
        position += len(char.encode())
        out.append((char, "answer", marks[position - 1]))
    return [group for _, group in _groups(out)]
