"""Keeps the text of users and tools from becoming control tokens.

What in a text spells a control token is hidden behind a sign while a template is rendered, and encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from edgespec.text.tokenizer import Tokenizer, encode_inside

_OPEN, _CLOSE = "\ufdd8", "\ufdd9"  # noncharacters, between which the number of a spelling stands
_SIGN = re.compile(rf"(?:{_OPEN}|\\ufdd8)(\d+)(?:{_CLOSE}|\\ufdd9)")  # as it is, or as a template writes it in JSON


class ControlText:
    """The spellings of a vocabulary's control tokens, such as <|im_end|>."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spellings = {tokenizer.special_text(token).strip() for token in tokenizer.control_tokens}
        self._spellings = sorted((each for each in spellings if len(each) > 1), key=len, reverse=True)
        self._numbers = {spelling: i for i, spelling in enumerate(self._spellings)}
        self._pattern = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")

    def hide(self, value: Any) -> Any:
        """A JSON value with signs in place of the spellings in its strings, keys excepted."""
        if isinstance(value, str):
            text = value.replace(_OPEN, "\ufffd").replace(_CLOSE, "\ufffd")
            return self._pattern.sub(lambda found: f"{_OPEN}{self._numbers[found[0]]}{_CLOSE}", text)
        if isinstance(value, Mapping):
            return {key: self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list | tuple) else value

    def show(self, text: str) -> str:
        """`text` with the spellings themselves."""
        return _SIGN.sub(lambda found: self._spellings[int(found[1])], text)

    def encode(self, text: str) -> list[int]:
        """Tokens of a rendered prompt: spellings that a template has written are control tokens, hidden ones are text.

        Text without hidden ones is encoded in one piece, as it would be without this class.
        """
        tokens: list[int] = []
        for before, piece in self._split(text):
            shown = self.show(piece)
            tokens += (
                self._tokenizer.encode(piece, parse_special=True) if shown == piece else self._plain(before, shown)
            )
        return tokens

    def _split(self, text: str) -> Iterator[tuple[str, str]]:
        """Each stretch between control tokens in which something is hidden, with the control token in front of it, and
        what stands between such stretches.
        """
        start = 0
        while (sign := _SIGN.search(text, start)) is not None:
            passed = [*self._pattern.finditer(text, start, sign.start())]
            begin = passed[-1].end() if passed else start
            following = self._pattern.search(text, sign.end())
            end = following.start() if following is not None else len(text)
            if begin > start:
                yield "", text[start:begin]
            yield (passed[-1][0] if passed else ""), text[begin:end]
            start = end
        if start < len(text) or not text:
            yield "", text[start:]

    def _plain(self, before: str, text: str) -> list[int]:
        """Tokens of plain text behind a control token."""
        encode = self._tokenizer.encode
        if not before or encode(before + "a", parse_special=True)[1:] == encode("a", parse_special=False):
            return encode(text, parse_special=False)
        inside = encode_inside(self._tokenizer, text)  # the tokenizer puts a space in front of a whole text alone
        return encode(text, parse_special=False) if inside is None else inside
