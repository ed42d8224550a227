"""What a session keeps of its forwards until they are committed or undone, and who may have begun one for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edgespec.backends.mlx.scores import MlxScores
from edgespec.core.protocols import Draft


@dataclass(frozen=True, slots=True)
class Mark:
    """A state of the caches that can be gone back to, `position` tokens long."""

    position: int
    saved: list[Any]


@dataclass(frozen=True, slots=True)
class Pending:
    """A forward that has not been committed."""

    root: int
    draft: Draft
    before: Mark


@dataclass(frozen=True, slots=True)
class Ahead:
    """A plain forward that was started on the first token of `scores` before the host had read it."""

    scores: MlxScores
    logits: Any
    before: Mark


class Attached(Protocol):
    """Whoever keeps provisional rows of its own behind a session's."""

    def resuming(self, root: int, draft: Draft) -> Callable[[Any], Any] | None:
        """What runs the rows [1, n] of this chain from where the borrower has got to with them, to the scores [n, V]
        that a whole forward would give; None where it has nothing of them."""
