"""The arguments of tool calls for interfaces in which they are objects rather than text."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

_OBJECT = TypeAdapter(dict[str, Any])


def read_arguments(text: str) -> dict[str, Any]:
    """The object of a call's arguments.

    Arguments that were cut end with their last complete value, as Anthropic's client reads them. Those that are not
    JSON are the value of INVALID_JSON, in which Anthropic's documentation wraps them.
    """
    if not text:
        return {}
    try:
        return dict(json.loads(text, parse_constant=lambda _: None))  # NaN is not JSON
    except (ValueError, RecursionError):
        pass
    try:
        return _OBJECT.validate_json(text, experimental_allow_partial=True)
    except ValueError:
        return {"INVALID_JSON": text}
