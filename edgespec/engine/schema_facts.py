"""What can be said about a JSON schema without an instance: its values, what it excludes, what contradicts it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations, islice
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "deprecated"})
_MAX_REFERENCES = 16  # followed from one schema
_MAX_BRANCHES = 48  # of a oneOf that is looked into
_MAX_SHARED = 16  # properties that are compared
_MAX_VALUES = 256
_CONSTANTS: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}


class Facts:
    """Facts about the schemas of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def resolve(self, schema: Any) -> Any:
        """The schema that a local `$ref` without siblings names, or `schema` itself."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or set(schema) - _ANNOTATIONS != {"$ref"}:
                break
            schema = self.follow(schema["$ref"])
        return schema

    def follow(self, reference: Any) -> Any:
        """What a reference of the form `#/a/b` names; True where it names nothing."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        found = self._root
        for step in reference[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            else:
                return True
        return found

    def values(self, schema: Any) -> list[Any] | None:
        """A superset of the values that `schema` allows; None where it is not known to be finite."""
        schema = self.resolve(schema)
        if not isinstance(schema, dict):
            return [] if schema is False else None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(found := schema.get("enum"), list):
            return found if len(found) <= _MAX_VALUES else None
        kind = schema.get("type")
        return _CONSTANTS.get(kind) if isinstance(kind, str) else None

    def are_disjoint(self, one: Any, other: Any, depth: int = 3) -> bool:
        """Whether it is certain that no value matches both schemas."""
        one, other = self.resolve(one), self.resolve(other)
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return one is False or other is False
        if not _types(one, self.values(one)) & _types(other, self.values(other)):
            return True
        values, others = self.values(one), self.values(other)
        if values is not None and others is not None:
            return not set(map(key_of, values)) & set(map(key_of, others))
        if one.get("type") != "object" or other.get("type") != "object" or not depth:
            return False
        if _forbids_required(one, other) or _forbids_required(other, one):
            return True
        fields, other_fields = _mapping(one, "properties"), _mapping(other, "properties")
        both = set(required_names(one)) & set(required_names(other)) & set(fields) & set(other_fields)
        shared = islice(sorted(both), _MAX_SHARED)
        return any(self.are_disjoint(fields[name], other_fields[name], depth - 1) for name in shared)

    def is_exclusive(self, branches: Sequence[Any]) -> bool:
        """Whether it is certain that no value matches two of `branches`."""
        if len(branches) > _MAX_BRANCHES:
            return False
        return all(self.are_disjoint(one, other) for one, other in combinations(branches, 2))

    def negate(self, schema: Any, base: Mapping[str, Any]) -> Any:
        """A schema for what `base` allows and `schema` does not; None where none is known."""
        schema = self.resolve(schema)
        if not isinstance(schema, dict):
            return not schema
        keys = set(schema) - _ANNOTATIONS
        if keys <= {"type"}:
            return _exclude_types(schema.get("type", list(TYPES)))
        if keys == {"not"}:
            return schema["not"]
        if keys == {"anyOf"} and isinstance(schema["anyOf"], list):
            parts = [self.negate(each, base) for each in schema["anyOf"]]
            return None if None in parts else {"allOf": parts}
        if keys == {"required"}:
            return {"type": "object", "anyOf": [{"properties": {name: False}} for name in required_names(schema)]}
        excluded, allowed = self.values(schema), self.values(base)
        if excluded is None or allowed is None or not keys <= {"const", "enum", "type"}:
            return None
        out = set(map(key_of, excluded))
        return {"enum": left} if (left := [each for each in allowed if key_of(each) not in out]) else False


def key_of(value: Any) -> str:
    """Equal for equal JSON values, and for no others."""
    return json.dumps(value, sort_keys=True)


def required_names(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}


def _types(schema: Mapping[str, Any], values: list[Any] | None) -> frozenset[str]:
    """The types that `schema` may allow; integers count as numbers."""
    if values is not None:
        return frozenset(map(_type_of, values))
    kinds = schema.get("type", list(TYPES))
    kinds = kinds if isinstance(kinds, list | tuple) else [kinds]
    return frozenset("number" if kind == "integer" else str(kind) for kind in kinds)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {type(None): "null", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _forbids_required(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `other` requires a property that `one` forbids."""
    if one.get("additionalProperties") is not False or "patternProperties" in one:
        return False
    return bool(set(required_names(other)) - set(_mapping(one, "properties")))


def _exclude_types(kinds: Any) -> Any:
    """What has none of the types `kinds`; None for integers, whose complement among the numbers has no schema."""
    out = set(map(str, kinds if isinstance(kinds, list | tuple) else [kinds]))
    if "number" in out:
        out.add("integer")
    elif "integer" in out:
        return None
    left = [kind for kind in TYPES if kind not in out and kind != "integer"]
    return {"type": left} if left else False
