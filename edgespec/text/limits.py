"""How much a chat template may use: it comes with the model, so it is not trusted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds for one template.

    `source_chars`: length of the template. `time_s`: seconds for one render. `size`: of any one value and of all
    output together, roughly in characters; `growth` times the size of the messages is added to it.
    """

    source_chars: int = 64 * 1024
    time_s: float = 2.0
    size: int = 4 * 1024 * 1024
    growth: int = 8
