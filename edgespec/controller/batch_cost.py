"""What rows cost one of several generations whose forwards are done as one."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.controller.cost_model import CostModel
from edgespec.core.batching import SOLO, BatchPeers

_LEAST = 0.25  # of its part: rows that fill a tile may make a forward faster, but nobody's are free


class MarginalCost:
    """The part of a forward's seconds that one generation answers for.

    If all decoded plainly, each would answer for an equal part. What its draft adds is its own. So whatever pays by
    this measure makes all generations together faster; with nobody beside it is the whole forward.
    """

    def __init__(self, costs: CostModel, peers: Callable[[], BatchPeers] = lambda: SOLO) -> None:
        """`peers` tells whom the next forward is shared with."""
        self._costs = costs
        self._asked = peers
        self._peers = SOLO

    def look(self) -> None:
        """See who is there, at the beginning of a round."""
        self._peers = self._asked()

    @property
    def reads(self) -> bool:
        """Whether others read their prompts in the same forward."""
        return self._peers.reads

    @property
    def n_peers(self) -> int:
        """How many others decode."""
        return self._peers.sessions

    @property
    def plain_measured(self) -> int:
        """How many measurements of a forward in which all decode plainly still count."""
        return self._costs.measured(self.n_peers + 1)

    def seconds(self, rows: int) -> float:
        """Of `rows` of its own, its root among them."""
        all_ = self.n_peers + 1
        if all_ == 1:
            return self._costs.seconds(rows)
        part = self._costs.seconds(all_) / all_
        peer_rows = self._peers.rows
        added = self._costs.seconds(peer_rows + rows) - self._costs.seconds(peer_rows + 1)
        return max(part + added, part * _LEAST)
