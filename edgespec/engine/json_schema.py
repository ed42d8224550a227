"""JSON schemas as a grammar can enforce them: keywords that llguidance lacks are written with those that it has.

What cannot be written so is left out and named, so that callers know what they have to check themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from edgespec.engine.schema_facts import Facts, required_names
from edgespec.engine.schema_patterns import FORMATS, is_regular, pattern_of
from edgespec.errors import InvalidRequest

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
