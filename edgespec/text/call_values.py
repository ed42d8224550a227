"""Reads values that are not JSON: text between tags, and literals in the manner of Python or of Gemma 4."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgespec.text.tool_calls import load_json

_NAMED = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"[^\s,:=\[\]{}()'\"<>|]+")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_QUOTED = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_VALUE_END = re.compile(r"\s*(?:[,)\]}:=]|$)")
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_MAX_DEPTH = 64


def read_tagged_value(text: str, schema: object, *, is_string: bool | None = None) -> Any:
    """The value of a text between tags, which has no quotes.

    A string if the schema allows one, or if the tag says so (`is_string`), even if it looks like JSON.
    """
    if (quoted := _QUOTED.fullmatch(text)) is not None:  # as XML quotes what looks like tags
        text, is_string = quoted[1], True
    types = allowed_types(schema)
    if is_string or (is_string is None and "string" in types):
        return None if not is_string and "null" in types and text.strip() == "null" else text
    stripped = text.strip()
    if stripped in _NAMED:
        return _NAMED[stripped]
    value = load_json(text, text)
    if value is text and stripped[:1] in ("[", "{"):  # some templates print lists as Python does
        try:
            return LiteralReader(stripped).read_all()
        except ValueError:
            return text
    return value


def allowed_types(schema: object) -> frozenset[str]:
    """The types that a schema allows; references are not followed."""
    if not isinstance(schema, Mapping):
        return frozenset()
    stated = schema.get("type")
    names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    types = {each for each in names if isinstance(each, str)}
    if isinstance(schema.get("enum"), list) and any(isinstance(each, str) for each in schema["enum"]):
        types.add("string")
    if isinstance(schema.get("const"), str):
        types.add("string")
    for key in ("anyOf", "oneOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            types |= allowed_types(each)
    return frozenset(types)


def json_type(value: object) -> str:
    """The type of a JSON value, as schemas name it."""
    kinds: tuple[tuple[type, str], ...] = (
        (str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"), (list, "array"), (Mapping, "object"),
    )  # fmt: skip
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def ends_string(text: str, at: int, quote: str) -> bool:
    """Whether the quote at `at` ends a string. Models do not escape every quote in a string, so a single character ends
    it only if the value ends there too.
    """
    return text.startswith(quote, at) and (len(quote) > 1 or _VALUE_END.match(text, at + 1) is not None)


class LiteralReader:
    """Reads the literals of a text from left to right: numbers, names, strings in quotes, lists and objects.

    Keys may have quotes or none, and stand before ":" or "=". A `quote` of several characters, such as Gemma 4's, is
    not escaped inside of its strings. Raises ValueError for a text that is none.
    """

    def __init__(self, text: str, quote: str = "'") -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def read_all(self) -> Any:
        """The one value of the whole text."""
        value = self._value(_MAX_DEPTH)
        if self._peek():
            raise ValueError("text behind the value")
        return value

    def read_members(self) -> dict[str, Any]:
        """The keys and values of the whole text, without brackets around them."""
        return self._members("", _MAX_DEPTH)

    def _members(self, closing: str, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while self._peek() != closing:
            key = self._string() if self._quote_here() else self._word()
            if self._peek() not in (":", "="):
                raise ValueError("a key without a value")
            self._at += 1
            members[key] = self._value(depth - 1)
            self._skip_comma(closing)
        self._at += len(closing)
        return members

    def _value(self, depth: int) -> Any:
        if depth <= 0:
            raise ValueError("nested too deep")
        if self._quote_here():
            return self._string()
        opening = self._peek()
        if opening == "{":
            self._at += 1
            return self._members("}", depth)
        if opening in ("[", "("):
            self._at += 1
            values: list[Any] = []
            while self._peek() != _CLOSING[opening]:
                values.append(self._value(depth - 1))
                self._skip_comma(_CLOSING[opening])
            self._at += 1
            return values
        word = self._word()
        return _NAMED[word] if word in _NAMED else json.loads(word)

    def _skip_comma(self, closing: str) -> None:
        if self._peek() == ",":
            self._at += 1
        elif self._peek() != closing:
            raise ValueError("no comma between values")

    def _peek(self) -> str:
        """The next character that is not blank; "" at the end."""
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _quote_here(self) -> str:
        """The quote that a string begins with here; "" if none begins."""
        self._peek()
        return next((each for each in (self._quote, "'", '"') if self._text.startswith(each, self._at)), "")

    def _string(self) -> str:
        quote = self._quote_here()
        self._at += len(quote)
        if len(quote) > 1:
            text, found, _ = self._text[self._at :].partition(quote)
            if not found:
                raise ValueError("a string that does not end")
            self._at += len(text) + len(quote)
            return text
        characters: list[str] = []
        while not ends_string(self._text, self._at, quote):
            if not (character := self._text[self._at : self._at + 1]):
                raise ValueError("a string that does not end")
            self._at += 1
            characters.append(self._escape() if character == "\\" else character)
        self._at += 1
        return "".join(characters).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _escape(self) -> str:
        """The character that is escaped by the backslash before."""
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if (length := {"x": 2, "u": 4, "U": 8}.get(kind)) is not None:
            code = self._text[self._at : self._at + length]
            self._at += length
            return chr(int(code, 16))
        return _ESCAPED.get(kind, kind if kind in "\\'\"\n" else "\\" + kind)

    def _word(self) -> str:
        self._peek()
        if (found := _WORD.match(self._text, self._at)) is None:
            raise ValueError("a value is missing")
        self._at = found.end()
        return found[0]
