"""Facts by name, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgespec.models.short_names import shorten_names
from edgespec.units import gib, significant


def format_facts(facts: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a name and a value, such as the text of `show`."""
    names = {key: _name(key) for key in facts}
    width = max(map(len, names.values()))
    for key, value in facts.items():
        yield f"{names[key]:{width}}  {_format(key, value)}"


def _name(key: object) -> str:
    return str(key).replace("_", " ")


def _format(key: object, value: Any) -> str:
    """A value as text: bytes, by their key, in GiB or MiB; items of a table with commas between, of a list with
    semicolons.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{_name(name)}: {_format(name, each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_format(key, each) for each in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return gib(int(value)) if "bytes" in str(key) else significant(value)
    return "none" if value is None else shorten_names(value) if key in ("name", "draft") else str(value)
