"""How likely a drafted token is accepted at each depth, given that those before it were."""

from __future__ import annotations

_DISCOUNT = 0.98  # of all earlier evidence, at every new piece of it
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0


class Acceptance:
    """Discounted acceptance rates by depth of one drafter.

    A round that accepts everything says nothing of the depth behind its last token. A depth that has seen little is
    drawn towards the one before it.
    """

    def __init__(self) -> None:
        self._accepted: list[float] = []
        self._tested: list[float] = []

    def observe(self, n_accepted: int, n_tested: int) -> None:
        """One round: depths 1..n_tested met a verdict, the first n_accepted of them a good one."""
        missing = n_tested - len(self._tested)
        self._accepted += [0.0] * missing
        self._tested += [0.0] * missing
        for at in range(n_tested):
            self._accepted[at] = self._accepted[at] * _DISCOUNT + (at < n_accepted)
            self._tested[at] = self._tested[at] * _DISCOUNT + 1

    def rates(self, depth: int) -> list[float]:
        """[depth] estimates for depths 1, 2, ..."""
        found: list[float] = []
        for at in range(depth):
            towards = found[-1] if found else _PRIOR
            accepted, tested = (x[at] if at < len(x) else 0.0 for x in (self._accepted, self._tested))
            found.append((accepted + _PRIOR_WEIGHT * towards) / (tested + _PRIOR_WEIGHT))
        return found
