"""A place in a conversation with several branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fork:
    """A place with several branches.

    parent    id of the turn before; None at the start
    branches  ids of the turns there, the oldest first
    at        index of the one on the screen; -1 where the screen ends before them
    """

    parent: int | None
    branches: Sequence[int]
    at: int

    @property
    def label(self) -> str:
        return f"‹ {self.at + 1}/{len(self.branches)} ›"  # noqa: RUF001
