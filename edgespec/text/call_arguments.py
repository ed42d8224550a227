"""Readers of the arguments of one call while they are written, as the JSON that clients get."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from edgespec.text.call_format import KEY, Arguments, CallFormat, LiteralArguments, TaggedArguments, loosen
from edgespec.text.call_values import LiteralReader, ends_string, read_tagged_value
from edgespec.text.tool_calls import CallDelta, CallEnd, CallStart, ToolCall


class OpenCall(ABC):
    """A call whose arguments are being written."""

    def __init__(self, start: CallStart) -> None:
        self.start = start
        self._arguments = ""
        self._is_whole = False

    def push(self, text: str) -> tuple[list[CallDelta | CallEnd], str, bool]:
        """Returns (parts that `text` makes certain, unread rest of `text`, whether the call has ended).

        Pass the unread rest again, with more text after it.
        """
        delta, rest = self._read(text)
        self._arguments += delta
        parts: list[CallDelta | CallEnd] = [CallDelta(self.start.index, delta)] if delta else []
        if self._is_whole:
            parts.append(self.finish())
        return parts, rest, self._is_whole

    def finish(self) -> CallEnd:
        """End the call, even if more of its arguments were to come: then the CallEnd is marked as cut."""
        return CallEnd(self.start.index, ToolCall(self.start.name, self._arguments), is_cut=self._is_cut())

    @abstractmethod
    def _read(self, text: str) -> tuple[str, str]:
        """Returns (JSON text that `text` adds to the arguments, unread rest of `text`). Sets `_is_whole` when the
        arguments have ended.
        """

    def _is_cut(self) -> bool:
        return not self._is_whole


class JsonCall(OpenCall):
    """The arguments are JSON. They are passed on as they are, but control characters in strings, which JSON forbids,
    are escaped.
    """

    def __init__(self, start: CallStart) -> None:
        super().__init__(start)
        self._depth = 0
        self._is_inside = False  # of a string
        self._is_escaped = False  # the next character of the string

    def _read(self, text: str) -> tuple[str, str]:
        delta: list[str] = []
        for at, character in enumerate(text):
            if character == "<" and not self._is_inside:  # no JSON: the markup behind arguments that were not closed
                self._is_whole = True
                return "".join(delta), text[at:]
            delta.append(self._take(character))
            if self._depth == 0:
                self._is_whole = True
                return "".join(delta), text[at + 1 :]
        return "".join(delta), ""

    def _is_cut(self) -> bool:
        return self._depth > 0 or not self._arguments

    def _take(self, character: str) -> str:
        """Read a character; returns it as JSON has it."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_inside and character < " ":
            return f"\\u{ord(character):04x}"
        elif character == '"':
            self._is_inside = not self._is_inside
        elif self._is_inside:
            self._is_escaped = character == "\\"
        elif character in "{}[]":
            self._depth += 1 if character in "{[" else -1
        return character


class TaggedCall(OpenCall):
    """The arguments stand between tags. Each is passed on when its value has ended."""

    def __init__(self, start: CallStart, tags: TaggedArguments, after: str, schema: Mapping[str, Any]) -> None:
        super().__init__(start)
        self._tags = tags
        self._after = after.strip()
        self._n_arguments = 0
        declared = schema.get("properties")
        self._schemas = declared if isinstance(declared, Mapping) else {}
        marks = f"(?P<string>{_loosen_mark(tags.string)})|{_loosen_mark(tags.other)}"
        self._head = re.compile(rf"\s*{loosen(tags.key.strip())}(?P<key>[^\n<>\"]+?)(?:{marks})")

    def _read(self, text: str) -> tuple[str, str]:
        delta = ""
        while (goes_on := self._goes_on(text)) and (head := self._head.match(text)) is not None:
            end = self._tags.end.replace(KEY, head["key"])
            value, found, rest = text[head.end() :].partition(end.strip())
            if not found:
                break
            delta += self._write(head, value.removesuffix("\n") if end[:1] == "\n" else value)
            text = rest
        if goes_on:
            return delta, text
        self._is_whole = True
        return delta + ("}" if self._n_arguments else "{}"), text

    def _goes_on(self, text: str) -> bool:
        """Whether an argument follows, or may follow when there is more text."""
        text = text.lstrip()
        if text.startswith(self._after):
            return False
        key = self._tags.key.strip()
        return text.startswith(key) or key.startswith(text) or self._after.startswith(text)

    def _write(self, head: re.Match[str], text: str) -> str:
        """An argument as a member of a JSON object, with the brace or comma in front of it."""
        key, schema = head["key"], self._schemas.get(head["key"])
        if KEY in self._tags.end and self._head.match(text):
            value = self._read_nested(text, schema)
        else:
            is_string = None if self._tags.string == self._tags.other else head["string"] is not None
            value = read_tagged_value(text, schema, is_string=is_string)
        self._n_arguments += 1
        opening = "{" if self._n_arguments == 1 else ", "
        return f"{opening}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"

    def _read_nested(self, text: str, schema: object) -> Any:
        """The object whose keys are the tags of `text`, or the list whose items are."""
        members: list[tuple[str, Any]] = []
        known = schema if isinstance(schema, Mapping) else {}
        while (head := self._head.match(text)) is not None:
            key = head["key"]
            inner, _, text = text[head.end() :].partition(self._tags.end.replace(KEY, key).strip())
            properties = known.get("properties")
            part = properties.get(key) if isinstance(properties, Mapping) else known.get("items")
            is_nested = self._head.match(inner) is not None
            members.append((key, self._read_nested(inner, part) if is_nested else read_tagged_value(inner, part)))
        is_list = known.get("type") == "array" or (not known and all(key == "item" for key, _ in members))
        return [value for _, value in members] if is_list else dict(members)


def _loosen_mark(mark: str) -> str:
    """A regular expression for the text in front of a value. Of the blanks at its end it takes one line break at most,
    since the others may belong to the value.
    """
    return loosen(mark.rstrip()) + (r"\n?" if mark.endswith("\n") else "")


class LiteralCall(OpenCall):
    """The arguments are literals. They are read when the call ends; text that cannot be read so becomes the argument
    `input`.
    """

    def __init__(self, start: CallStart, literals: LiteralArguments, after: str) -> None:
        super().__init__(start)
        self._quotes = (literals.quote, '"') if len(literals.quote) == 1 else (literals.quote,)
        self._language = literals
        self._end = after.strip()[:1]
        self._text = ""
        self._quote = ""  # of the string that is being read
        self._depth = 0

    def _read(self, text: str) -> tuple[str, str]:
        at = 0
        while at < len(text):
            if not self._quote and not self._depth and text[at] == self._end:
                self._is_whole = True
                self._text += text[:at]
                return self._as_json(), text[at:]
            if any(each.startswith(text[at:]) and each != text[at:] for each in self._quotes):
                break  # a quote may have begun
            step = self._step(text, at)
            if not step or at + step > len(text):
                break
            at += step
        self._text += text[:at]
        return "", text[at:]

    def _step(self, text: str, at: int) -> int:
        """How many characters to skip at `at`; 0 if that depends on text that has not come. Follows quotes and
        brackets.
        """
        if self._quote and len(self._quote) == 1 and text[at] == "\\":
            return 2
        quotes = (self._quote,) if self._quote else self._quotes
        if (quote := next((each for each in quotes if text.startswith(each, at)), "")) != "":
            if self._quote and not text[at + len(quote) :].strip():
                return 0
            if not self._quote or ends_string(text, at, quote):
                self._quote = "" if self._quote else quote
            return len(quote)
        if not self._quote and text[at] in "([{":
            self._depth += 1
        elif not self._quote and text[at] in ")]}":
            self._depth -= 1
        return 1

    def _as_json(self) -> str:
        try:
            members: dict[str, Any] = LiteralReader(self._text, self._language.quote).read_members()
        except (ValueError, RecursionError):
            members = {"input": self._text}
        return json.dumps(members, ensure_ascii=False)


def open_call(start: CallStart, call_format: CallFormat, schema: Mapping[str, Any]) -> OpenCall:
    """What reads the arguments of a call of a tool with this schema."""
    arguments: Arguments = call_format.arguments
    if isinstance(arguments, TaggedArguments):
        return TaggedCall(start, arguments, call_format.after, schema)
    if isinstance(arguments, LiteralArguments):
        return LiteralCall(start, arguments, call_format.after)
    return JsonCall(start)
