"""Bounds of a JSON schema, so that its grammar is of a size that can be followed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgespec.errors import InvalidRequest

MAX_DEPTH = 64
MAX_CHARACTERS = 2**18
MAX_PROPERTIES = 4000
MAX_OPTIONAL = 256  # of one object: each may come next at any place, so a row of the parser holds all of them
MAX_PATTERN_PROPERTIES = 64  # llguidance intersects each pair of them
MAX_CONSTANTS = 4096
MAX_BRANCHES = 1000  # of anyOf, oneOf and allOf


def check_bounds(schema: Any) -> None:
    """Raises InvalidRequest for a schema beyond the bounds, or a list of schemas beyond them together. Their depth is
    at most MAX_DEPTH.

    Names of properties that are keywords of JSON schema may be counted as such.
    """
    objects = list(_mappings(schema))
    counts = {
        ("properties", MAX_PROPERTIES): sum(_size(each.get("properties"), Mapping) for each in objects),
        ("patternProperties", MAX_PATTERN_PROPERTIES): sum(
            _size(each.get("patternProperties"), Mapping) for each in objects
        ),
        ("constants in enum", MAX_CONSTANTS): sum(_size(each.get("enum"), list) for each in objects),
        ("branches of anyOf, oneOf and allOf", MAX_BRANCHES): sum(
            _size(each.get(name), list) for each in objects for name in ("anyOf", "oneOf", "allOf")
        ),
        ("optional properties in one object", MAX_OPTIONAL): max(map(_count_optional, objects), default=0),
    }
    for (what, limit), count in counts.items():
        if count > limit:
            raise InvalidRequest(f"the JSON schema has {count:,} {what}; {limit:,} are allowed.", hint="Simplify it.")


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """The JSON objects inside a JSON value, and the value itself if it is one."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _mappings(each)


def _count_optional(schema: Mapping[str, Any]) -> int:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return 0
    names = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    return sum(name not in names for name in properties)


def _size(value: object, kind: type) -> int:
    return len(value) if isinstance(value, kind) and hasattr(value, "__len__") else 0
