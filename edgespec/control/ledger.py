"""Never slower than plain decoding: an account of the time that drafting has won or lost."""

from __future__ import annotations

_ALLOWED_SHARE = 0.01  # of all time, that drafting may have lost
_ALLOWED_STEPS = 2.0  # plain steps that it may have lost beside
_MOST_ROOM = 6.0  # plain steps that one round may risk, however much was won before


class Ledger:
    """The account of one generation, in plain steps."""

    def __init__(self) -> None:
        self._balance = 0.0
        self._untried = 0.0  # what drafts that there was no room for have lost, and not yet made good
        self._elapsed = 0.0

    def add(self, tokens: int, steps: float) -> None:
        """A round emitted `tokens` in what `steps` plain steps usually take."""
        self._elapsed += steps
        self._credit(tokens - steps)

    def add_untried(self, tokens: int, steps: float) -> None:
        """A draft for which there was no room would have emitted `tokens` in `steps` plain steps.

        What such drafts would have won makes room for the next one, twice of what there is at first at most, once it
        outweighs what they would have lost. No time was lost with them, so that they take no room away.
        """
        balance = self._untried + tokens - steps
        self._untried = min(max(balance, -_ALLOWED_STEPS), 0.0)
        won = max(balance, 0.0)
        self._balance = max(self._balance, min(self._balance + won, _ALLOWED_STEPS))

    def room(self, beside: int = 0) -> float:
        """Plain steps that the next round may lose if all of its draft is wrong. Generations that share their forwards,
        `beside` so many others, share what may be lost at the beginning.
        """
        return self._balance + _ALLOWED_SHARE * self._elapsed + _ALLOWED_STEPS / (1 + beside)

    def _credit(self, steps: float) -> None:
        self._balance = min(self._balance + steps, _MOST_ROOM - _ALLOWED_STEPS)
