"""The tokenizer interface that every runtime implements."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from edgespec.errors import InvalidRequest


class Tokenizer(Protocol):
    """Text to token ids and back, over a backend's own vocabulary. Any thread may use it while the model is open."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id in range(vocab_size) is valid."""

    @property
    def bos(self) -> int | None:
        """The begin-of-sequence id, or None if the vocabulary has none."""

    @property
    def eos(self) -> int | None:
        """The end-of-sequence id, which templates may insert between turns, or None."""

    @property
    def add_bos(self) -> bool:
        """Whether the model was trained with `bos` before every sequence."""

    @property
    def end_of_generation(self) -> frozenset[int]:
        """Ids after which a model has finished its turn (EOS, EOT, EOM ...)."""

    @property
    def control_tokens(self) -> Iterable[int]:
        """Ids without text, such as `<|im_end|>`."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of `text`, never with an added BOS.

        With `parse_special`, text that spells a special token (`<|im_end|>`) becomes that token; without it,
        plain text.
        """

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text; they may end inside a UTF-8 character. Empty for control tokens."""

    def special_text(self, token: int) -> str:
        """The spelling of a token (`<s>`, `<think>`), for templates and comparisons; never empty for a valid id."""


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token; of a control token, which adds none to a text, its spelling."""
    return tokenizer.piece(token) or tokenizer.special_text(token).encode()


_BEFORE = ("", "\n", "a", ".")  # texts to put before another; one at least should share no token with it


def encode_inside(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Token ids whose bytes are exactly those of `text`, as in the middle of an answer; None if there are none.

    `encode` treats `text` as a whole one: many vocabularies put a space before it, and some normalize it.
    """
    wanted = text.encode("utf-8", "replace")
    for before in _BEFORE:
        head = tokenizer.encode(before, parse_special=False)
        tokens = tokenizer.encode(before + text, parse_special=False)
        inside = tokens[len(head) :]
        is_text = not tokenizer.end_of_generation.intersection(inside)
        if is_text and tokens[: len(head)] == head and b"".join(map(tokenizer.piece, inside)) == wanted:
            return inside
    return None


_BOUNDARY = 256  # characters of the prompt that decide how the text behind it is encoded


def join_start(tokenizer: Tokenizer, prompt: str, start: str) -> str:
    """`prompt` with `start`, the beginning of the answer, behind it, so that encoding adds exactly the bytes of
    `start`.

    Behind a control token, many SentencePiece vocabularies put a space in front of the text. The model wrote that space
    as part of its first token, so it is the first one in `start`, and must not be there twice. A blank start is left
    alone: no text is encoded as that space only.
    """
    if not start.startswith(" ") or start.isspace():
        return prompt + start
    end = prompt[-_BOUNDARY:]
    before, after = (
        b"".join(map(tokenizer.piece, tokenizer.encode(text, parse_special=True))) for text in (end, end + start)
    )
    return prompt + (start[1:] if after == before + b" " + start.encode("utf-8", "replace") else start)


class StreamDecoder:
    """Turns one stream of tokens into text.

    `visible` are control tokens to spell out (`special_text`); other control tokens add nothing. The texts of all
    `push` calls, joined, are the tokens' bytes decoded as UTF-8, with U+FFFD for invalid bytes, except those of a
    character that the last token leaves incomplete. Bytes are held back only while they may still become a character.
    """

    def __init__(self, tokenizer: Tokenizer, visible: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._visible = visible
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def holds_bytes(self) -> bool:
        """Whether a character has begun and is not complete."""
        return bool(self._utf8.getstate()[0])

    def push(self, token: int) -> str:
        """The text that `token` completes; often empty, or one character late."""
        if token in self._visible:
            return self._utf8.decode(b"", final=True) + self._tokenizer.special_text(token)
        return self._utf8.decode(self._tokenizer.piece(token))


MAX_STOPS = 16
MAX_STOP_CHARS = 256


class StopStrings:
    """Finds stop strings in a stream of text; `stop` is the one that ended it, which is not part of the text.

    The earliest match wins, and of several at one place the shortest. A match therefore waits while an earlier one may
    still be completed, so that the result does not depend on how the stream is cut. Raises InvalidRequest for more than
    MAX_STOPS strings, for an empty one, and for one longer than MAX_STOP_CHARS.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"{len(stops)} stop strings are too many.", hint=f"Give at most {MAX_STOPS}.")
        if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidRequest(
                "a stop string is empty or too long.", hint=f"Give stop strings of 1 to {MAX_STOP_CHARS} characters."
            )
        self._stops = tuple(sorted(stops, key=len))
        self._held = ""
        self.stop: str | None = None

    @property
    def holds_text(self) -> bool:
        """Whether text is held back, or has been dropped with a stop string."""
        return bool(self._held)

    def push(self, text: str, *, final: bool = False) -> str:
        """Add `text`; returns the text that is certain. An end that may become a stop string is held back."""
        if not self._stops:
            return text
        if self.stop is not None:
            return ""
        held = self._held + text
        found = [(start, stop) for stop in self._stops if (start := held.find(stop)) >= 0]
        end, stop = min(found, key=lambda match: match[0], default=(len(held), None))
        maybe = len(held) if final else find_unfinished(held, self._stops)
        if maybe < end:
            end = maybe
        else:
            self.stop = stop
        self._held = held[end:]
        return held[:end]

    def finish(self) -> str:
        """End the stream; returns the text that was held back. A match that was waiting for an earlier one counts."""
        return self.push("", final=True)


def find_unfinished(text: str, markers: Iterable[str]) -> int:
    """The start of the longest suffix of `text` that is a proper prefix of a marker; len(text) if there is none."""
    first = len(text)
    for marker in markers:
        for start in range(max(0, len(text) - len(marker) + 1), first):
            if marker.startswith(text[start:]):
                first = start
                break
    return first
