"""The cost of a draft's rows to one of several generations that share their forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.draft_size import COUNTS
from edgespec.core.peers import SOLO, BatchPeers

_CHEAP_ROW = 0.15  # of a plain step: rows are cheap if a further one takes at most that
_FILLED = range(3, 8)  # draft nodes of a forward that is filled with them because rows are cheap
_LONG_STEP_S = 0.05  # the shortest plain step beside which drafters that fill rows take next to no time
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
        self.position = 0  # of the next forward's root
        self.peers = SOLO  # of that forward
        self._query_peers = query_peers
        self._steps: dict[int, float] = {}
        self._least_rate = 0.0
        self._known = (-1, SOLO)  # the model's revision and the peers of these two

    def begin_round(self, position: int) -> None:
        """The next forward's root is at `position`; queries its peers."""
        self.position = position
        self.model.move_to(position)
        self.peers = self._query_peers()

    @property
    def has_cheap_rows(self) -> bool:
        """Whether a forward of some rows takes little longer than a plain step, which is not short."""
        row = min((self.steps[n] - 1.0) / n for n in _FILLED)
        return self.model.seconds(1) >= _LONG_STEP_S and row <= _CHEAP_ROW

    @property
    def steps(self) -> Mapping[int, float]:
        """Plain steps that are charged for a forward by its draft nodes, of which COUNTS are looked up."""
        self._look_up()
        return self._steps

    @property
    def least_rate(self) -> float:
        """The acceptance of a draft's first token from which on one may pay: a token's price where it is lowest.

        No later token is more probable, so that below this rate the tokens of any draft cost more than they bring.
        """
        self._look_up()
        return self._least_rate

    def seconds(self, rows: int) -> float:
        """Seconds charged for `rows` rows, the root included."""
        seconds, peers = self.model.seconds, self.peers
        if not peers.sessions:
            return seconds(rows)
        equal_part = seconds(peers.sessions + 1) / (peers.sessions + 1)
        added = seconds(peers.rows + rows) - seconds(peers.rows + 1)
        return max(equal_part + added, equal_part * _MIN_SHARE)

    def _look_up(self) -> None:
        if self._known != (known := (self.model.revision, self.peers)):
            plain_s = self.seconds(1)
            self._steps = {n: self.seconds(n + 1) / plain_s for n in COUNTS}
            self._least_rate = min([(self._steps[n] - 1.0) / n for n in COUNTS if n])
            self._known = known
