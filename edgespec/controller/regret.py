"""Never slower than plain decoding: an account of the time that drafting has won or lost."""

from __future__ import annotations

_ALLOWED_SHARE = 0.01  # of all time, that drafting may have lost
_ALLOWED_STEPS = 2.0  # plain steps that it may have lost n_peers
_MOST_ROOM = 6.0  # plain steps that one round may risk, however much was won before


class RegretBudget:
    """The account of one generation, in plain steps.

    Whatever happens, drafting loses no more than twice what is allowed at first, and a share of the time.
    """

    def __init__(self) -> None:
        self._balance = 0.0
        self._credit = 0.0  # of it, on the word of drafts that there was no room for
        self._untried = 0.0  # what such drafts have lost, and not yet made good
        self._elapsed = 0.0

    def add(self, tokens: int, steps: float) -> None:
        """A round emitted `tokens` in what `steps` plain steps usually take. What it won pays back first."""
        self._elapsed += steps
        won = tokens - steps
        paid_back = min(max(won, 0.0), self._credit)
        self._credit -= paid_back
        self._balance = min(self._balance + won - paid_back, _MOST_ROOM - _ALLOWED_STEPS)

    def add_untried(self, tokens: int, steps: float) -> None:
        """A draft for which there was no room would have emitted `tokens` in `steps` plain steps.

        What such drafts would have won, once it outweighs what they would have lost, lends room to the next one, at
        most as much as there is at first. No time was lost with them, so that they take no room away.
        """
        balance = self._untried + tokens - steps
        self._untried = min(max(balance, -_ALLOWED_STEPS), 0.0)
        lent = min(balance, _ALLOWED_STEPS - self._balance, _ALLOWED_STEPS - self._credit)
        if lent > 0:
            self._balance += lent
            self._credit += lent

    def allowance(self, n_peers: int = 0) -> float:
        """Plain steps that the next round may lose if all of its draft is wrong. Generations that share their forwards,
        `n_peers` so many others, share what may be lost at the beginning.
        """
        return self._balance + _ALLOWED_SHARE * self._elapsed + _ALLOWED_STEPS / (1 + n_peers)
