"""Forwards of a session that are not committed yet, and the protocol of a draft that runs behind its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edgespec.backends.mlx.scores import MlxScores
from edgespec.core.protocols import Draft


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the caches that holds `position` tokens and can be restored."""

    position: int
    caches: list[Any]


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A forward that was not committed yet, and the caches before it."""

    root: int
    draft: Draft
    before: Snapshot


@dataclass(frozen=True, slots=True)
class AheadForward:
    """A plain forward that was started on the first token of `scores` before the host had read that token."""

    scores: MlxScores
    logits: Any
    before: Snapshot


class CacheTenant(Protocol):
    """A draft session that keeps provisional rows behind the target's in its caches."""

    def find_continuation(self, root: int, draft: Draft) -> Callable[[Any], Any] | None:
        """A function from the rows [1, n] of this chain to their scores [n, V], which uses what the draft has computed
        of them; None where it has computed nothing of them."""
