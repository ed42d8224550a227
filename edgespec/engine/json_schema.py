"""JSON schemas as a grammar can enforce them: keywords that llguidance lacks are written with those that it has.

What cannot be written so is left out and named, so that callers know what they have to check themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations
from typing import Any

from edgespec.errors import InvalidRequest

# What can be said about a JSON schema without an instance: its values, what it excludes, what contradicts it.


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


# Regular expressions and formats of JSON schemas that a grammar can follow.


FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_NAME_FORMATS = {
    "uuid": r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "date": r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$",
}


def is_regular(pattern: object) -> bool:
    """Whether a pattern has no look-around, back reference or word boundary."""
    if not isinstance(pattern, str):
        return True
    found = re.findall(r"\\(.)|(\(\?<?[=!])", pattern, re.DOTALL)
    return not any(look or escape in "123456789kbBc" for escape, look in found)


def pattern_of(names: Any) -> str | None:
    """A pattern for property names that follow `names`: "" for any name, None where there is no pattern."""
    if not isinstance(names, dict):
        return "" if names is True else None
    rules = set(names) & {"pattern", "format", "minLength", "maxLength", "not", "anyOf", "oneOf", "allOf", "$ref"}
    if not rules:
        return ""
    if rules == {"pattern"}:
        return str(names["pattern"]) if is_regular(names["pattern"]) else None
    if rules == {"format"}:
        return _NAME_FORMATS.get(str(names["format"]))
    if rules <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


_MAX_NODES = 2**16  # of the adapted schema
_MAX_NAMED = 32  # keywords in the warnings
_MAX_SET = 4  # values of a set that is written out, in all orders
_UNBOUNDED = 2**31
_MAX_CHOICES = 4  # rules of one object that double its alternatives
_SINGLE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COMPOSITE = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "contains"})
_DIALECT = re.compile(r"https?://json-schema\.org/draft(-0[3467]|/20(19-09|20-12))/schema#?")


@dataclass(frozen=True, slots=True)
class AdaptedSchema:
    """A schema for llguidance, and one sentence for each keyword that it leaves out."""

    schema: Any
    unenforced: tuple[str, ...]


def adapt_schema(schema: Any) -> AdaptedSchema:
    """Raises InvalidRequest for a schema that is too large."""
    adapter = _Adapter(schema)
    adapted = adapter.adapt(schema, "#", {})
    named = list(dict.fromkeys(adapter.unenforced))
    more = [f"and {len(named) - _MAX_NAMED} more."] if len(named) > _MAX_NAMED else []
    return AdaptedSchema(adapted, (*named[:_MAX_NAMED], *more))


class _Adapter:
    """Adapts the schemas of one document. The methods below `adapt` change the schema that they are given."""

    def __init__(self, root: Any) -> None:
        self.unenforced: list[str] = []
        self._facts = Facts(root)
        self._n_nodes = 0

    def adapt(self, schema: Any, where: str, base: Mapping[str, Any]) -> Any:
        """`schema` for llguidance. `base` is the schema that holds it in `allOf`, whose properties it may mention."""
        self._n_nodes += 1
        if self._n_nodes > _MAX_NODES:
            raise InvalidRequest("the JSON schema is too large.", hint="Simplify it.")
        if not isinstance(schema, dict):
            return schema
        out = dict(schema)
        self._write_references(out)
        self._write_conditions(out, {**base, **out}, where)
        self._write_negation(out, where)
        self._write_dependencies(out, where)
        self._write_names(out, where)
        self._write_unevaluated(out, where)
        self._write_counts(out, where)
        self._write_set(out, where)
        self._drop_text_rules(out, where)
        branches = out.get("oneOf")
        if isinstance(branches, list) and not self._facts.is_exclusive(branches):
            self._name("oneOf", where)
        return self._adapt_parts(out, where)

    def _adapt_parts(self, out: dict[str, Any], where: str) -> dict[str, Any]:
        for key in _SINGLE:
            if isinstance(out.get(key), dict):
                out[key] = self.adapt(out[key], f"{where}/{key}", {})
        for key in _LISTS:
            if isinstance(parts := out.get(key), list):
                base = out if key == "allOf" else {}
                out[key] = [self.adapt(part, f"{where}/{key}/{i}", base) for i, part in enumerate(parts)]
        for key in _MAPS:
            if isinstance(named := out.get(key), dict):
                out[key] = {name: self.adapt(part, f"{where}/{key}/{name}", {}) for name, part in named.items()}
        return out

    def _name(self, keyword: str, where: str) -> None:
        self.unenforced.append(f"{keyword} at {where[:200]} is not enforced.")

    def _write_references(self, out: dict[str, Any]) -> None:
        if isinstance(dialect := out.get("$schema"), str) and not _DIALECT.fullmatch(dialect):
            del out["$schema"]
        for dynamic, plain in (("$dynamicRef", "$ref"), ("$recursiveRef", "$ref"), ("$dynamicAnchor", "$anchor")):
            if dynamic in out:
                out.setdefault(plain, out.pop(dynamic))
        out.pop("$recursiveAnchor", None)

    def _write_conditions(self, out: dict[str, Any], base: Mapping[str, Any], where: str) -> None:
        """if, then, else: alternatives by the values of one property."""
        test, then, otherwise = out.pop("if", None), out.pop("then", True), out.pop("else", True)
        if test is None:
            return
        if isinstance(test, bool) or not test:
            _add(out, otherwise if test is False else then)
        elif (branches := self._split(test, then, otherwise, base)) is not None:
            _add(out, {"anyOf": branches})
        else:
            self._name("if", where)

    def _split(self, test: Any, then: Any, otherwise: Any, base: Mapping[str, Any]) -> list[Any] | None:
        """The alternatives of a condition on one property that has few values; None for other conditions."""
        test = self._facts.resolve(test)
        if not isinstance(test, dict) or not set(test) <= {"properties", "required", "type"}:
            return None
        tested, known = test.get("properties"), base.get("properties")
        if base.get("type") != "object" or test.get("type", "object") != "object":
            return None
        if not (isinstance(tested, dict) and isinstance(known, dict) and len(tested) == 1):
            return None
        (name,) = tested
        possible, wanted = self._facts.values(known.get(name)), self._facts.values(tested[name])
        if possible is None or wanted is None or not set(required_names(test)) <= {name}:
            return None
        inside = [value for value in possible if value in wanted]
        outside = [value for value in possible if value not in wanted]
        parts = [(inside, then), (outside, otherwise)]
        branches = [
            {"properties": {name: {"enum": values}}, "required": [name], "allOf": [rule]}
            for values, rule in parts
            if values and rule is not False
        ]
        absent = otherwise if name in required_names(test) else then
        if name not in required_names(base) and absent is not False:
            branches.append({"properties": {name: False}, "allOf": [absent]})
        return branches

    def _write_negation(self, out: dict[str, Any], where: str) -> None:
        if "not" not in out:
            return
        negation = self._facts.negate(out.pop("not"), out)
        if negation is None:
            self._name("not", where)
        elif isinstance(negation, dict) and set(negation) == {"enum"}:
            out.pop("const", None)
            out.update(negation)
        else:
            _add(out, negation)

    def _write_dependencies(self, out: dict[str, Any], where: str) -> None:
        """Alternatives without the property, or with what it needs."""
        n_choices, required = 0, required_names(out)
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            rules = out.pop(key, None)
            for name, needed in rules.items() if isinstance(rules, dict) else ():
                rule = {"required": needed} if isinstance(needed, list) else needed
                if name in required:
                    _add(out, rule)
                elif n_choices < _MAX_CHOICES:
                    n_choices += 1
                    _add(out, {"anyOf": [{"properties": {name: False}}, rule]})
                else:
                    self._name(f"{key} of {name}", where)

    def _write_names(self, out: dict[str, Any], where: str) -> None:
        """propertyNames: named properties for few names, a pattern for others."""
        if "propertyNames" not in out:
            return
        names = self._facts.resolve(out.pop("propertyNames"))
        fields, rest = out.get("properties", {}), out.get("additionalProperties", True)
        values = self._facts.values(names)
        if not isinstance(fields, dict) or "patternProperties" in out:
            self._name("propertyNames", where)
        elif values is not None:
            out["properties"] = {name: fields.get(name, rest) for name in values if isinstance(name, str)}
            out["additionalProperties"] = False
        elif (pattern := pattern_of(names)) is None:
            self._name("propertyNames", where)
        elif pattern and rest is not False:
            if fields and rest is not True and rest != {}:
                self._name("propertyNames", where)
                return
            out["patternProperties"], out["additionalProperties"] = {pattern: rest}, False

    def _write_unevaluated(self, out: dict[str, Any], where: str) -> None:
        """unevaluatedProperties and unevaluatedItems, as additionalProperties and items."""
        rest = out.pop("unevaluatedProperties", True)
        if rest is not True and rest != {} and "additionalProperties" not in out:
            names = self._evaluated(out, 8)
            if names is None:
                self._name("unevaluatedProperties", where)
            else:
                fields = out.get("properties")
                out["properties"] = {**dict.fromkeys(names, True), **(fields if isinstance(fields, dict) else {})}
                out["additionalProperties"] = rest
        items = out.pop("unevaluatedItems", True)
        if items is not True and items != {} and "items" not in out:
            if _COMPOSITE & set(out):
                self._name("unevaluatedItems", where)
            else:
                out["items"] = items

    def _evaluated(self, schema: Any, depth: int) -> list[str] | None:
        """The properties that `schema` and its `allOf` name; None where they depend on the object."""
        if not isinstance(schema, dict):
            return []
        if not depth or {"anyOf", "oneOf", "if", "dependentSchemas"} & set(schema):
            return None
        if depth < 8 and {"additionalProperties", "patternProperties", "unevaluatedProperties"} & set(schema):
            return None
        fields = schema.get("properties")
        names = list(fields) if isinstance(fields, dict) else []
        parts = schema.get("allOf")
        inner = list(parts) if isinstance(parts, list) else []
        if "$ref" in schema:
            inner.append(self._facts.follow(schema["$ref"]))
        for part in inner:
            found = self._evaluated(part, depth - 1)
            if found is None:
                return None
            names += found
        return names

    def _write_counts(self, out: dict[str, Any], where: str) -> None:
        """minProperties and maxProperties of objects with optional properties; contains."""
        fields, required = out.get("properties"), required_names(out)
        if isinstance(fields, dict) and set(fields) - set(required):
            least, most = _take_count(out, "minProperties", 0), _take_count(out, "maxProperties", _UNBOUNDED)
            if least == 1 and not required:
                _add(out, {"anyOf": [{"required": [name]} for name in list(fields)[: 2 * _MAX_CHOICES]]})
            elif least > len(required):
                self._name("minProperties", where)
            if most < _UNBOUNDED and (out.get("additionalProperties") is not False or len(fields) > most):
                self._name("maxProperties", where)
        least, most = _take_count(out, "minContains", 1), _take_count(out, "maxContains", _UNBOUNDED)
        if "contains" not in out:
            return
        wanted = out.pop("contains")
        if wanted is True or wanted == {} or ("prefixItems" not in out and wanted == out.get("items")):
            _add(out, {"minItems": least, **({"maxItems": most} if most < _UNBOUNDED else {})})
        elif least or most < _UNBOUNDED:
            self._name("contains", where)

    def _write_set(self, out: dict[str, Any], where: str) -> None:
        """uniqueItems: every order of a few values."""
        if out.pop("uniqueItems", False) is not True:
            return
        if out.get("maxItems") in (0, 1):
            return
        values = self._facts.values(out.get("items"))
        if values is None or len(values) > _MAX_SET or "prefixItems" in out:
            self._name("uniqueItems", where)
            return
        least, most = _take_count(out, "minItems", 0), _take_count(out, "maxItems", _UNBOUNDED)
        sizes = range(least, min(most, len(values)) + 1)
        orders = [order for size in sizes for order in permutations(values, size)]
        ways = [
            {"prefixItems": [{"const": value} for value in order], "items": False, "minItems": len(order)}
            for order in orders
        ]
        out.update({"type": "array", "items": True})
        _add(out, {"anyOf": ways} if ways else False)

    def _drop_text_rules(self, out: dict[str, Any], where: str) -> None:
        """Formats that llguidance does not know, and patterns that are not regular."""
        kinds = out.get("type", "string")
        is_text = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
        if out.get("format") == "time" and isinstance(out.get("pattern"), str):
            del out["format"]  # zod's times have no zone, which the format demands
        if "format" in out and not (is_text and str(out["format"]) in FORMATS):
            form = out.pop("format")
            if is_text and not {"pattern", "enum", "const"} & set(out):
                self._name(f"format '{str(form)[:50]}'", where)
        if not is_regular(out.get("pattern", "")):
            del out["pattern"]
            self._name("pattern", where)
        patterns = out.get("patternProperties")
        if isinstance(patterns, dict) and not all(map(is_regular, patterns)):
            out["patternProperties"] = {each: rule for each, rule in patterns.items() if is_regular(each)}
            if "additionalProperties" in out:
                out["additionalProperties"] = True
            self._name("patternProperties", where)


def _take_count(out: dict[str, Any], key: str, default: int) -> int:
    """Remove a number of items or properties from `out`; `default` where there is none."""
    found = out.pop(key, default)
    is_count = isinstance(found, int) or (isinstance(found, float) and found.is_integer())
    return max(0, int(found)) if is_count else default


def _add(out: dict[str, Any], rule: Any) -> None:
    """Demand `rule` too."""
    parts = out.get("allOf")
    out["allOf"] = [*(parts if isinstance(parts, list) else ()), rule]


# Bounds of a JSON schema, so that its grammar is of a size that can be followed.


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
