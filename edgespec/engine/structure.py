"""The structure that a text must have: JSON by a schema, a grammar, or parts of both in a row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.engine.schema_adaptation import SCALARS, adapt_schema, close_arguments, close_objects, move_references
from edgespec.errors import InvalidRequest, reason_of

MAX_DEPTH = 64


def is_shallow(value: object, depth: int) -> bool:
    """Whether a JSON value is nested at most `depth` deep."""
    if isinstance(value, list | tuple):
        inner: Iterable[object] = value
    elif isinstance(value, Mapping):
        inner = value.values()
    else:
        return True
    return depth > 0 and all(isinstance(each, SCALARS) or is_shallow(each, depth - 1) for each in inner)


_WHITESPACE = r"\x20?"  # between JSON tokens: models that may write more spend a third of their tokens on it


@dataclass(frozen=True, slots=True)
class Json:
    """JSON that follows `schema`, a JSON schema as text. `unenforced` names what is left out of it, in sentences."""

    schema: str
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text that follows a grammar in llguidance's Lark."""

    lark: str


@dataclass(frozen=True, slots=True)
class Either:
    """One of several sequences of parts."""

    alternatives: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class Maybe:
    """A sequence of parts, or nothing."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to the first `end`, which is a part of it. `pattern`: regular expression of the text before."""

    end: str
    pattern: str = "(?s:.*)"


Part = str | Json | Grammar | Either | Maybe | Until
"""A str is literal text; what in it spells a control token stands for that token."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The grammar of an answer: one of several sequences of parts.

    first, last  the parts before and after it
    between      the parts between repeats, of which there may be 16; None if it is not repeated
    """

    alternatives: tuple[tuple[Part, ...], ...]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    between: tuple[str, ...] | None = None

    @property
    def unenforced(self) -> tuple[str, ...]:
        """What was left out of the schemas, in sentences; the compiler may leave out more."""
        parts = (part for parts in self.alternatives for part in _find_json(parts))
        return tuple(dict.fromkeys(each for part in parts for each in part.unenforced))


def _find_json(parts: Iterable[Part]) -> Iterator[Json]:
    for part in parts:
        if isinstance(part, Json):
            yield part
        elif isinstance(part, Maybe):
            yield from _find_json(part.parts)
        elif isinstance(part, Either):
            for alternative in part.alternatives:
                yield from _find_json(alternative)


def json_part(schema: Any, *, is_strict: bool = False) -> Json:
    """JSON that follows `schema`, given as JSON values.

    Raises InvalidRequest for a schema that is no JSON or nested too deep. If `is_strict`, a schema that cannot be
    enforced as a whole is refused, here or by the engine; else the engine names what it leaves out, see Finished.
    """
    if not is_shallow(schema, MAX_DEPTH):
        raise InvalidRequest(f"the JSON schema is nested more than {MAX_DEPTH} deep.")
    try:
        adapted, dropped = adapt_schema(schema)
        close_objects(adapted)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the JSON schema cannot be read: {error}.", hint="Check the schema.") from error
    if isinstance(adapted, dict):
        options = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": not is_strict, "lenient": not is_strict}
        adapted["x-guidance"] = options
    text = json.dumps(adapted)
    if is_strict and dropped:
        raise InvalidRequest(
            f"strict is true, but the schema cannot be enforced: {dropped[0]}",
            hint="Remove strict, or change the schema.",
        )
    return Json(text, tuple(dropped))


def arguments_part(parameters: Mapping[str, Any], *, is_strict: bool = False) -> Json:
    """The arguments of a tool with the schema `parameters`; see `json_part`. Raises InvalidRequest."""
    schema: dict[str, Any] = {"type": "object", **parameters}
    close_arguments(schema)
    return json_part(schema, is_strict=is_strict)


def call_part(name: str, key: str, parameters: Mapping[str, Any], *, is_strict: bool = False) -> Json:
    """An object with the `name` of a tool, and under `key` its arguments; see `json_part`. Raises InvalidRequest."""
    schema: dict[str, Any] = {"type": "object", **move_references(dict(parameters), f"#/properties/{key}")}
    close_arguments(schema)
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, key: schema},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return json_part(call, is_strict=is_strict)


def json_structure(schema: Any = None, *, is_strict: bool = False) -> Structure:
    """JSON that follows `schema`, or any object without one; see `json_part`. Raises InvalidRequest."""
    return Structure(((json_part({"type": "object"} if schema is None else schema, is_strict=is_strict),),))


def grammar_structure(text: str) -> Structure:
    """Text that follows a grammar in GBNF, which llama.cpp reads, or in llguidance's Lark. Raises InvalidRequest."""
    if "::=" not in text:
        return Structure(((Grammar(text),),))
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = gbnf_to_lark(text)
    except Exception as error:
        fault = reason_of(error).partition(", '")[0]  # without an excerpt
        raise InvalidRequest(f"the grammar cannot be read: {fault[:200]}.") from error
    return Structure(((Grammar(lark.removeprefix("%llguidance {}")),),))


def regex_structure(pattern: str) -> Structure:
    """Text of which the whole matches a regular expression."""
    inner = pattern.removeprefix("^")
    before = inner.removesuffix("$")
    n_backslashes = len(before) - len(before.rstrip("\\"))
    inner = inner if n_backslashes % 2 else before  # an escaped dollar is a part of the text
    escaped = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), inner)
    return Structure(((Grammar(f"start: /(?:{escaped})/"),),))


def choice_structure(texts: Iterable[str]) -> Structure:
    """One of several texts, even if one spells a control token."""
    return Structure(tuple((Grammar(f"start: {json.dumps(text)}"),) for text in texts))


def either(one: Structure, other: Structure) -> Structure:
    """An answer of the one structure or of the other, not repeated."""
    return Structure(
        tuple((*each.first, *alternative, *each.last) for each in (one, other) for alternative in each.alternatives)
    )
