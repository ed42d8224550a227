"""The cost of a draft's rows to one of several generations that share their forwards."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.controller.cost_model import CostModel
from edgespec.core.batching import SOLO, BatchPeers

_CHEAP_ROW = 0.15  # of a plain step, that a further row takes where drafters may fill rows
_FILLED_ROWS = range(4, 9)  # of a forward with such a draft
_LONG_STEP_S = 0.05  # of a plain step, of which the time of such drafters is next to nothing
_MIN_SHARE = 0.25  # of the equal part: rows that fill a tile can make a forward faster, but no generation's are free


class MarginalCost:
    """The part of a forward's seconds that is charged to one generation.

    If all generations decoded plainly, each would be charged an equal part. Rows that a draft adds are charged to it in
    full. A draft that pays by this measure therefore makes all generations together faster. Without peers the charge is
    the whole forward.
    """

    def __init__(self, model: CostModel, query_peers: Callable[[], BatchPeers] = lambda: SOLO) -> None:
        """`query_peers` returns the peers of the next forward."""
        self.model = model
        self._query_peers = query_peers
        self._peers = SOLO

    def begin_round(self, position: int) -> None:
        """The next forward's root is at `position`; queries its peers."""
        self.model.move_to(position)
        self._peers = self._query_peers()

    @property
    def has_prefill(self) -> bool:
        """Whether the next forward also reads prompts of peers."""
        return self._peers.prefilling

    @property
    def n_peers(self) -> int:
        """Other generations that decode in the next forward."""
        return self._peers.sessions

    @property
    def plain_measured(self) -> int:
        """Recent measurements of a forward in which all generations decode plainly."""
        return self.model.count_recent(self.n_peers + 1)

    @property
    def has_cheap_rows(self) -> bool:
        """Whether a forward of some rows takes little longer than a plain step, which is not short."""
        plain_s = self.model.seconds(1)
        row_s = min((self.model.seconds(rows) - plain_s) / (rows - 1) for rows in _FILLED_ROWS)
        return plain_s >= _LONG_STEP_S and row_s <= _CHEAP_ROW * plain_s

    def seconds(self, rows: int) -> float:
        """Seconds charged for `rows` rows, the root included."""
        if not self._peers.sessions:
            return self.model.seconds(rows)
        n_generations = self.n_peers + 1
        equal_part = self.model.seconds(n_generations) / n_generations
        peer_rows = self._peers.rows
        added = self.model.seconds(peer_rows + rows) - self.model.seconds(peer_rows + 1)
        return max(equal_part + added, equal_part * _MIN_SHARE)
