"""Messages between a process and the engine process that it started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from edgespec.service.client import ModelInfo


@dataclass(frozen=True, slots=True)
class Call:
    """Call `method` of the EngineClient; its stream is number `number`. Without a method: cancel that stream."""

    number: int
    method: str = ""
    arguments: tuple[Any, ...] = ()
    has_reporter: bool = False


class Events(NamedTuple):
    """New events of streams, by their numbers."""

    by_stream: dict[int, list[Any]]


@dataclass(frozen=True, slots=True)
class End:
    """The end of a stream, with its last events. `model_info` is left out where it has not changed since."""

    number: int
    events: list[Any]
    error: BaseException | None
    model_info: ModelInfo | None
    is_model_info_new: bool


@dataclass(frozen=True, slots=True)
class Report:
    """A call of the Reporter."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """The engine process lives, and the thread that owns its models goes on."""
