"""Forwards of a session that are not committed yet, and the protocol of a draft that runs behind its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from edgespec.backends.mlx.scores import MlxScores
from edgespec.core.protocols import Draft


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the caches that holds `position` tokens and can be restored."""

    position: int
    caches: list[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a forward computes, on the device: scores [n, V], and features [n, width] where the session has a tap."""

    logits: Any
    features: Any = None

    def skip(self, n: int) -> Rows:
        """All but the first `n` rows."""
        return Rows(self.logits[n:], None if self.features is None else self.features[n:]) if n else self


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A forward that was not committed yet, and the caches before it."""

    root: int
    draft: Draft
    before: Snapshot
    features: Any

    def features_of(self, path: Sequence[int]) -> Any:
        """[len(path) + 1, width] of the root and the nodes of `path`; None without a tap."""
        if self.features is None:
            return None
        if list(path) == list(range(len(path))):
            return self.features[: len(path) + 1]
        return self.features[mx.array([0, *(node + 1 for node in path)])]


@dataclass(frozen=True, slots=True)
class AheadForward:
    """A plain forward that was started on the first token of `scores` before the host had read that token."""

    scores: MlxScores
    rows: Rows
    before: Snapshot


class CacheTenant(Protocol):
    """A draft session that keeps provisional rows behind the target's in its caches."""

    def find_continuation(self, root: int, draft: Draft) -> Callable[[Any], Any] | None:
        """A function from the rows [1, n] of this chain to their scores [n, V], which uses what the draft has computed
        of them; None where it has computed nothing of them."""
