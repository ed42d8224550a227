"""Bounds of one render of a chat template, which comes with a model and is not trusted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import TemplateError

_UNIT = 64  # counted for each value in addition to its characters; about its bytes
_MAX_INT_BITS = 4096
_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type[Any], ...] = (dict, list, tuple, set, frozenset, *_VIEWS)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds for one template.

    source_chars  length of the template
    time_s        seconds for one render
    size          of any one value and of all output together, about in characters
    growth        times the size of the input is added to `size`
    """

    source_chars: int = 64 * 1024
    time_s: float = 2.0
    size: int = 4 * 1024 * 1024
    growth: int = 8


class Meter:
    """Measures the values of one render against its limits. Every method raises TemplateError beyond a limit."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._deadline_s = time.monotonic() + limits.time_s
        self._max_size = self._output_left = limits.size
        self._known: dict[int, int] = {}  # id of an input list or dict -> its size

    def admit(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
        """Raise the size limit in proportion to the input, and keep the input's sizes."""
        self._max_size = 2**62  # no limit for the input itself
        inputs = [*messages, *values.values(), messages]
        self._known = {id(value): self.size_of(value) for value in inputs if isinstance(value, (list, dict))}
        input_size = self.size_of(messages) + self.size_of(list(values.values()))
        self._max_size = self._output_left = self._limits.size + self._limits.growth * input_size

    def tick(self) -> bool:
        """Check the time. Returns True, for use inside conditions."""
        if time.monotonic() > self._deadline_s:
            raise template_error(f"runs longer than {self._limits.time_s:g} s")
        return True

    def measure(self, value: Any) -> Any:
        """Check the time and the size of `value`; returns `value`."""
        self.tick()
        self.size_of(value)
        return value

    def size_of(self, value: Any) -> int:
        """About how many characters `value` would print as; stops counting at the limit."""
        total, stack = 0, [value]
        while stack:
            value = stack.pop()
            total += self._known.get(id(value), 0) or _UNIT
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, int):
                if value.bit_length() > _MAX_INT_BITS:
                    raise template_error("computes with very large numbers")
            elif isinstance(value, _CONTAINERS) and id(value) not in self._known:
                stack += value
                stack += value.values() if isinstance(value, dict) else ()
            if total > self._max_size:
                raise template_error("builds a value that is too large")
        return total

    def check_size(self, size: int) -> None:
        """Check the time and the predicted `size` of a value before it is built."""
        self.tick()
        if size > self._max_size:
            raise template_error("builds a value that is too large")

    def emit(self, value: Any) -> str:
        """The text of `value`, counted as output."""
        text = str(self.measure(value))
        self._output_left -= len(text)
        if self._output_left < 0:
            raise template_error("writes too much text")
        return text


def template_error(problem: str, *, line: int | None = None) -> TemplateError:
    """The error for a template that breaks a limit or fails; `line` is the template's line."""
    where = "" if line is None else f" (line {line})"
    hint = "Use another file of this model or another template."
    return TemplateError(f"the chat template {problem}{where}.", hint=hint)
