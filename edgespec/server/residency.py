"""Loading and unloading, and how long a model stays loaded: Ollama's `keep_alive`, LM Studio's `ttl`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from edgespec.server.fields import Body, ModelName
from edgespec.server.model_slot import ModelSlot
from edgespec.server.record import current_record
from edgespec.server.slot import Slot
from edgespec.units import parse_duration

_MAX_LENGTH = 64
_NOT_ALLOWED = "keep_alive (ttl) is ignored: this caller may not manage models."


def _parse(value: Any) -> float:
    if not isinstance(value, int | float | str):
        raise ValueError("neither a number nor a duration")
    return parse_duration(str(value)[:_MAX_LENGTH])


KeepAlive = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_parse, json_schema_input_type=float | str)]
"""Seconds, or a duration such as "10m"; less than 0 is without end: `inf`."""


class ResidencyBody(Body):
    """A request that names a model. What the last call has set counts until the model is unloaded."""

    keep_alive: KeepAlive | None = Field(default=None, validation_alias=AliasChoices("ttl", "keep_alive"))

    def keep(self, slot: Slot) -> tuple[str, ...]:
        """Set how long a model of this machine stays loaded; returns a warning where the caller may not."""
        if self.keep_alive is None or not isinstance(slot, ModelSlot):
            return ()
        if not current_record().caller.may_manage:
            return (_NOT_ALLOWED,)
        slot.keep_alive_s = self.keep_alive
        return ()


class LoadRequest(ResidencyBody):
    """The body of /models/load."""

    model: ModelName


class UnloadRequest(Body):
    """The body of /models/unload. `now`: end the model's process, whatever it does; its requests fail."""

    model: ModelName
    now: bool = False
