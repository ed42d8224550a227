"""Tokens to pieces: decoding, reasoning, stop strings and origins together."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.text.reasoning import detect_format
from edgespec.text.stream import Piece, TextStream
from edgespec.text.tokenizer import StopStrings, Tokenizer

Table = Callable[..., Tokenizer]
THINK = detect_format("<think>{{ m.thinking }}</think>")
LETTERS = [b"a", b"b", b"c", "é".encode()[:1], "é".encode()[1:], *(bytes([c]) for c in b"<think>/ ")]
BOS, EOG, OPEN, CLOSE, A, B, C = range(7)


def run(stream: TextStream, tokens: list[tuple[int, str]]) -> list[Piece]:
    pieces = [piece for token, origin in tokens for piece in stream.push(token, origin)]
    return pieces + stream.finish()


def text(pieces: list[Piece], channel: str) -> str:
    return "".join(p.text for p in pieces if p.channel == channel)


def chars(pieces: list[Piece]) -> list[tuple[str, str, str]]:
    return [(char, piece.channel, piece.drafter) for piece in pieces for char in piece.text]


_origins = st.sampled_from(["", "ngram", "model"])
_tokens = st.lists(st.tuples(st.integers(A, C), _origins), max_size=20)
_stops = st.lists(st.text("abc", min_size=1, max_size=3), max_size=3)


@given(_tokens, _tokens, _stops)
@example([], [(A, "ngram"), (B, ""), (A, "ngram")], ["ab", "bc"])
@example([(A, "ngram")], [(A, "ngram"), (B, "")], ["abc"])
def test_channels_stops_and_origins(
    table: Table, thought: list[tuple[int, str]], answer: list[tuple[int, str]], stops: list[str]
) -> None:
    """Each character is in its channel, and has the origin of the token with which it is shown."""
    tokenizer = table(LETTERS)
    stream = TextStream(tokenizer, stops, THINK)
    pieces = run(stream, [(OPEN, "ngram"), *thought, (CLOSE, ""), *answer])
    expected = [(tokenizer.piece(t).decode(), "reasoning", origin) for t, origin in thought]
    spoken = [(tokenizer.piece(t).decode(), "answer", origin) for t, origin in answer]
    search = StopStrings(stops)
    kept = search.push("".join(c for c, _, _ in spoken)) + search.finish()
    if stops:
        assert [each[:2] for each in chars(pieces)] == [each[:2] for each in expected + spoken[: len(kept)]]
    else:
        assert chars(pieces) == expected + spoken
    assert stream.stop == search.stop and stream.stopped == (search.stop is not None)


def test_one_piece_per_run_of_one_origin(table: Table) -> None:
    stream = TextStream(table(LETTERS), ["aabb"])
    held = [stream.push(t, "ngram") for t in (A, A, B)]
    assert held == [[], [], []]
    assert stream.push(C, "ngram") == [Piece("aabc", "answer", "ngram")]


def test_control_markers_are_read_and_not_shown(table: Table) -> None:
    stream = TextStream(table(LETTERS), [], THINK)
    pieces = run(stream, [(OPEN, ""), (A, "ngram"), (CLOSE, ""), (B, "ngram"), (OPEN, "")])
    assert pieces[:2] == [Piece("a", "reasoning", "ngram"), Piece("b", "answer", "ngram")]


def test_control_tokens_without_a_format_are_silent(table: Table) -> None:
    assert run(TextStream(table(LETTERS)), [(OPEN, ""), (A, "")]) == [Piece("a", "answer", "")]


def test_visible_markers_are_text_and_still_tell_the_channel(table: Table) -> None:
    tokenizer = table(LETTERS)
    stream = TextStream(tokenizer, [], THINK, visible=["<think>", "</think>"])
    tokens = [(A, ""), (CLOSE, "ngram"), (B, "")]
    channels = []
    stream.push(OPEN, "")
    for token, origin in tokens:
        stream.push(token, origin)
        channels.append(stream.channel)
    assert channels == ["reasoning", "answer", "answer"]
    shown = run(TextStream(tokenizer, [], THINK, visible=["<think>", "</think>"]), [(OPEN, ""), *tokens])
    assert text(shown, "answer") == "<think>a</think>b" and not text(shown, "reasoning")


def test_stops_spare_reasoning_and_headers_that_are_shown(table: Table) -> None:
    """GPT-OSS' messages where another reader tells them apart."""
    tokenizer = table([bytes([byte]) for byte in range(256)])
    form = detect_format("<|channel|> <|message|> analysis")
    written = "<|channel|>analysis<|message|>b final b<|end|><|start|>assistant<|channel|>final<|message|>a final b"
    tokens = [(token, "") for token in tokenizer.encode(written, parse_special=False)]
    assert form is not None
    for stops, shown in (([], written), (["final"], written[:-7]), (["b"], written[:-1]), (["assistant"], written)):
        stream = TextStream(tokenizer, stops, form, visible=form.markers)
        pieces = run(stream, tokens)
        assert text(pieces, "answer") == shown and not text(pieces, "reasoning")
        assert stream.stopped == (shown != written)


def test_prompt_that_opened_the_block(table: Table) -> None:
    stream = TextStream(table(LETTERS), [], THINK, prompt_tail="assistant\n<think>\n")
    assert stream.push(A, "") == [Piece("a", "reasoning", "")]


def test_stop_string_does_not_reach_across_reasoning(table: Table) -> None:
    form = detect_format("[THINK][/THINK]")
    tokenizer = table([*LETTERS, b"[THINK]", b"[/THINK]"])
    first, last = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    stream = TextStream(tokenizer, ["ab"], form)
    pieces = run(stream, [(A, "ngram"), (first, ""), (C, ""), (last, ""), (B, "")])
    assert pieces == [Piece("a", "answer", ""), Piece("c", "reasoning", ""), Piece("b", "answer", "")]
    assert not stream.stopped


def test_end_of_generation_has_no_text(table: Table) -> None:
    assert run(TextStream(table(LETTERS)), [(A, ""), (EOG, "ngram")]) == [Piece("a", "answer", "")]
    assert run(TextStream(table(LETTERS, end=B)), [(A, ""), (B, "ngram")]) == [Piece("a", "answer", "")]


def test_a_character_belongs_to_its_last_token_and_is_left_out_without_it(table: Table) -> None:
    assert run(TextStream(table(LETTERS)), [(A, ""), (7, "ngram")]) == [Piece("a", "answer", "")]
    assert run(TextStream(table(LETTERS)), [(7, ""), (8, "ngram")]) == [Piece("é", "answer", "ngram")]
