"""Streaming detokenization: whole characters only."""

from __future__ import annotations

import codecs

from edgespec.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns one stream of tokens into text.

    `visible` are control tokens to spell out (`special_text`); other control tokens add nothing. The texts of all
    `push` calls and of `finish`, joined, are the tokens' bytes decoded as UTF-8, with U+FFFD for invalid bytes. Bytes
    are held back only while they may still become a character.
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
            return self.finish() + self._tokenizer.special_text(token)
        text = self._utf8.decode(self._tokenizer.piece(token))
        waiting, _ = self._utf8.getstate()
        if waiting[:1] == b"\xed" and waiting[1:] >= b"\xa0":  # half a surrogate is invalid, but Python waits
            text += self.finish()
        return text

    def finish(self) -> str:
        """U+FFFD for a character that was cut short, else nothing."""
        return self._utf8.decode(b"", final=True)
