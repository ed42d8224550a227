"""Regular expressions and formats of JSON schemas that a grammar can follow."""

from __future__ import annotations

import re
from typing import Any

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
