"""The tools of a request, and calls as chat interfaces write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.engine.structure import is_shallow
from edgespec.errors import InvalidRequest
from edgespec.text.tool_calls import NAME_CHARACTER, load_json

_MAX_ARGUMENTS_DEPTH = 64
_NAME = re.compile(rf"{NAME_CHARACTER}{{1,256}}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema. `is_strict`: each call follows all of the
    schema, and a schema that cannot be enforced is refused. It has no effect where calling is the model's choice and
    its format does not mark calls.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def make_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, *, is_strict: bool = False
) -> Tool:
    """A tool of a request. Without a schema it takes no arguments. Raises InvalidRequest for a name that the formats of
    tool calls cannot hold.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"the tool name '{name[:100]}' cannot be called.",
            hint="Use 1 to 256 ASCII letters, digits or _ . : / - in it.",
        )
    return Tool(name, description or "", parameters or {"type": "object"}, is_strict)


def format_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call as chat templates and OpenAI's chat interface write it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_arguments(text: str) -> Any:
    """A call's arguments as chat templates expect them: parsed JSON, or `text` if it is invalid or too deep."""
    value = load_json(text, text)
    return value if is_shallow(value, _MAX_ARGUMENTS_DEPTH) else text
