"""JSON schemas in the form that llguidance compiles. What it does not implement it leaves out with a warning.

Rewritten is only what would make it refuse a common schema, or ignore what can be said in another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_DEPTH = 64
_SCALARS = (str, int, float, type(None))
_DIALECT = re.compile(r"https?://json-schema\.org/draft(-0[3467]|/20(19-09|20-12))/schema#?")
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")  # characters of regular expressions
_NAME_FORMATS = {
    "uuid": r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "date": r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$",
}


def adapt_schema(root: Any) -> tuple[Any, list[str]]:
    """(`root`, nested at most MAX_DEPTH deep, for llguidance; the rules that are left out of it, as sentences)"""
    dropped: list[str] = []

    def adapt(schema: Any, where: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        if schema.get("not") in ({}, True) and "not" in schema:  # zod's never
            return False
        out = dict(schema)
        if isinstance(dialect := out.get("$schema"), str) and not _DIALECT.fullmatch(dialect):
            del out["$schema"]  # it cannot be fetched
        _write_names(out, root)
        if not _is_regular(out.get("pattern")):
            del out["pattern"]
            dropped.append(f"pattern at {where} is not enforced.")
        if isinstance(out.get("pattern"), str):
            out.pop("format", None)  # zod's pattern of a time contradicts the format, which demands a zone
        if isinstance(patterns := out.get("patternProperties"), dict) and not all(map(_is_regular, patterns)):
            out["patternProperties"] = {each: rule for each, rule in patterns.items() if _is_regular(each)}
            out["additionalProperties"] = True
            dropped.append(f"patternProperties at {where} is not enforced.")
        for key in ("items", "additionalProperties", "additionalItems"):
            if key in out and not isinstance(out[key], list):
                out[key] = adapt(out[key], f"{where}/{key}")
        for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
            if isinstance(parts := out.get(key), list):
                out[key] = [adapt(part, f"{where}/{key}/{i}") for i, part in enumerate(parts)]
        for key in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(named := out.get(key), dict):
                out[key] = {name: adapt(part, f"{where}/{key}/{name}"[:200]) for name, part in named.items()}
        return out

    return adapt(root, "#"), list(dict.fromkeys(dropped))


def _write_names(out: dict[str, Any], root: Any) -> None:
    """Write the propertyNames of a dictionary, which has no named properties, as a pattern; others stay."""
    pattern = _find_name_pattern(_follow(out.get("propertyNames"), root))
    if pattern == "":
        del out["propertyNames"]
    elif pattern is not None and not {"properties", "patternProperties"} & set(out):
        del out["propertyNames"]
        out["patternProperties"] = {pattern: out.get("additionalProperties", True)}
        out["additionalProperties"] = False


def _find_name_pattern(names: Any) -> str | None:
    """A pattern for the texts that the schema `names` allows: "" for any text, None where none is known."""
    if not isinstance(names, dict):
        return None
    values = [names["const"]] if "const" in names else names.get("enum")
    if isinstance(values, list):
        texts = (_SPECIAL.sub(r"\\\g<0>", value) for value in values if isinstance(value, str))
        return f"^(?:{'|'.join(texts)})$"
    rules = {key: value for key, value in names.items() if key not in ("type", "title", "description", "$schema")}
    if set(rules) == {"pattern"} and _is_regular(rules["pattern"]):
        return str(rules["pattern"])
    if set(rules) == {"format"}:
        return _NAME_FORMATS.get(str(rules["format"]))
    if rules and set(rules) <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{rules.get('minLength', 0)},{rules.get('maxLength', '')}}}$"
    return None if rules else ""


def _follow(schema: Any, root: Any) -> Any:
    """What a local reference such as `#/$defs/Colour` names, or `schema` itself."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found = root
    for step in reference[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _is_regular(pattern: object) -> bool:
    """Whether a pattern has no look-around, back reference or word boundary."""
    if not isinstance(pattern, str):
        return True
    found = re.findall(r"\\(.)|(\(\?<?[=!])", pattern, re.DOTALL)
    return not any(look or escape in "123456789kbBc" for escape, look in found)


def is_shallow(value: object, depth: int) -> bool:
    """Whether a JSON value is nested at most `depth` deep."""
    if isinstance(value, list | tuple):
        inner: Iterable[object] = value
    elif isinstance(value, Mapping):
        inner = value.values()
    else:
        return True
    return depth > 0 and all(isinstance(each, _SCALARS) or is_shallow(each, depth - 1) for each in inner)
