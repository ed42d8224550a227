"""The functions that a call offers to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def described(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}
