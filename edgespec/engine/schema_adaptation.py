"""Adapt a JSON schema to the grammar compiler: patterns it cannot read, scattered names, references, open objects."""

from __future__ import annotations

import json
import re
from typing import Any

SCALARS = (str, int, float, type(None))
_DIALECT = re.compile(r"https?://json-schema\.org/draft(-0[3467]|/20(19-09|20-12))/schema#?")
_IRREGULAR = re.compile(r"\(\?<?[=!]|\\[1-9kbB]")
_ESCAPE = re.compile(r"\\[^1-9kbB]", re.DOTALL)
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # their keys are names


def adapt_schema(schema: Any) -> tuple[Any, list[str]]:
    """(a copy of `schema` for llguidance; the rules that are left out of it, as sentences)

    Only what would make llguidance refuse a common schema is rewritten or left out. Other rules that llguidance cannot
    enforce it leaves out itself, with a warning. Raises TypeError or ValueError for what is not JSON.
    """
    dropped: list[str] = []

    def is_irregular(pattern: str) -> bool:
        if found := _IRREGULAR.search(_ESCAPE.sub("", pattern)):
            dropped.append(f"the pattern {pattern[:100]!r} is not enforced: it has {found[0]}.")
        return found is not None

    def adapt(part: dict[str, Any]) -> dict[str, Any]:
        dialect, pattern, patterns = map(part.get, ("$schema", "pattern", "patternProperties"))
        if isinstance(dialect, str) and not _DIALECT.fullmatch(dialect):
            del part["$schema"]  # it cannot be fetched
        if isinstance(pattern, str):
            part.pop("format", None)  # zod's pattern of a time contradicts the format, which demands a zone
            if is_irregular(pattern):
                del part["pattern"]
        if isinstance(patterns, dict) and (irregular := list(filter(is_irregular, patterns))):
            part["patternProperties"] = {name: rule for name, rule in patterns.items() if name not in irregular}
            part["additionalProperties"] = True
        if isinstance(names := part.get("propertyNames"), dict):
            named = find_reference(root, names.get("$ref"))
            _write_names(part, adapt(dict(named)) if isinstance(named, dict) and named.keys() <= _SIMPLE else names)
        return part

    def walk(part: Any, *, is_named: bool = False) -> Any:
        """Adapts `part` or, if it `is_named`, the schemas that it has by name; values that are constants stay."""
        if isinstance(part, list):
            return [walk(each) for each in part]
        if not isinstance(part, dict):
            return part
        if is_named:
            return {name: walk(each) for name, each in part.items()}
        return adapt(
            {
                key: each if key in ("const", "enum") else walk(each, is_named=key in _NAMED)
                for key, each in part.items()
            }
        )

    root = json.loads(json.dumps(schema))
    return walk(root), list(dict.fromkeys(dropped))


_LENGTHS = {"minLength", "maxLength"}
_NOTES = {"title", "description", "examples"}
_SIMPLE = {"type", "enum", "const", "pattern", "format", *_LENGTHS, *_NOTES}  # they have no schemas in them
_MAX_NAME = 256  # characters of names whose length is bounded


def _write_names(part: dict[str, Any], names: dict[str, Any]) -> None:
    """Write the rules of `propertyNames`, which llguidance does not read, as properties or as a pattern of them.

    What has no such form stays, and llguidance names it.
    """
    declared, others = part.get("properties", {}), part.get("additionalProperties", True)
    rules = names.keys() - {"type"} - _NOTES
    if names.get("type", "string") != "string" or "patternProperties" in part or not isinstance(declared, dict):
        return
    if (listed := _list_strings(names)) is not None:
        part["properties"] = {
            name: declared.get(name, others) for name in listed if name in declared or others is not False
        }
    elif rules and not declared and (pattern := _make_pattern(names, rules)) is not None:
        part["patternProperties"] = {pattern: others}
    elif rules:
        return
    if rules:
        part["additionalProperties"] = False
    del part["propertyNames"]


def _list_strings(schema: Any) -> list[str] | None:
    """The strings that a schema lists; None if it does anything else."""
    if not isinstance(schema, dict) or len(rules := schema.keys() - {"type"} - _NOTES) != 1:
        return None
    match rules.pop(), schema:
        case "const", {"const": str(value)}:
            return [value]
        case "enum", {"enum": list(values)}:
            return [value for value in values if isinstance(value, str)]
        case "anyOf", {"anyOf": list(choices)}:
            listed = [_list_strings(choice) for choice in choices]
            return (
                [value for each in listed for value in each or ()] if all(each is not None for each in listed) else None
            )
    return None


def _make_pattern(names: dict[str, Any], rules: set[str]) -> str | None:
    """The regular expression of names with a pattern, or of a length."""
    if rules == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    bounds = [each for each in (least, most) if each != ""]
    if rules <= _LENGTHS and all(type(each) is int and 0 <= each <= _MAX_NAME for each in bounds):
        return f"^(?s:.{{{least},{most}}})$"
    return None


def find_reference(root: Any, reference: Any) -> Any:
    """What a reference to another place in the schema `root` leads to; None if it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        name = key.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


_CONDITIONS = ("not", "if", "then", "else", "dependentSchemas")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", *_CONDITIONS)
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf")


def close_objects(schema: Any) -> None:
    """Forbid keys that are not declared in objects that declare some and say nothing of others.

    The schema admits any keys there, and small models write them until their limit. All objects of a schema stay open
    if the keys of one are declared in several places, such as in `allOf`, or in choices beside `properties`.
    """
    if not _is_scattered(schema):
        _close(schema)


def _is_scattered(part: Any) -> bool:
    """Whether what one value has to follow stands in several places."""
    if isinstance(part, list):
        return any(map(_is_scattered, part))
    if not isinstance(part, dict):
        return False
    places = sum(key in part for key in _ELSEWHERE) + ("properties" in part or "required" in part)
    return "allOf" in part or places > 1 or any(map(_is_scattered, part.values()))


def _close(part: Any, *, is_named: bool = False) -> None:
    """`is_named`: the values of `part` are schemas by name."""
    if isinstance(part, list):
        for each in part:
            _close(each)
    if not isinstance(part, dict):
        return
    declared = None if is_named else part.get("properties")
    skipped: tuple[str, ...] = () if is_named else ("const", "enum", *_CONDITIONS)
    is_closed = isinstance(declared, dict) and declared and not any(key in part for key in _OPEN)
    if is_closed and {*part.get("required", ())} <= {*(declared or ())}:
        part["additionalProperties"] = False
    for key, each in part.items():
        if key not in skipped:
            _close(each, is_named=not is_named and key in _NAMED)


def close_arguments(schema: dict[str, Any]) -> None:
    """Forbid any keys in a tool's arguments if its schema declares none and says nothing of others.

    Such a tool takes no arguments; small models would write some until their limit.
    """
    says = ("propertyNames", "minProperties", "enum", "const", *_OPEN, *_ELSEWHERE)
    if not (schema.get("properties") or schema.get("required") or any(key in schema for key in says)):
        schema["additionalProperties"] = False


def move_references(part: Any, base: str) -> Any:
    """A copy of a schema whose references hold when its root is at `base`, such as "#/properties/arguments".

    Those below an `$id` of their own start there.
    """
    if isinstance(part, list):
        return [move_references(each, base) for each in part]
    if not isinstance(part, dict) or isinstance(part.get("$id"), str):
        return part
    moved = {key: each if key in ("const", "enum") else move_references(each, base) for key, each in part.items()}
    target = part.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = base + target[1:]
    return moved
