"""The regret budget: a limit on the time that drafting may lose against plain decoding."""

from __future__ import annotations

from collections.abc import Callable

_ALLOWED_SHARE = 0.01  # share of all time that drafting may lose
_LEAST_ALLOWED, _MOST_ALLOWED = 1.0, 2.0  # plain steps that it may lose in addition
_USUAL_ROWS = range(4, 17)  # of a forward with a lookup's draft
_MAX_SAVINGS = 32.0  # plain steps of earlier gains that a round may risk, in addition: a long draft on a CPU
_LENT_SHARE = 1 / 8  # of the gains that blocked drafts would have had, lent in any case
_READ_ROUNDS = 64  # rounds over which the reading of the draft model is charged


def choose_allowed_loss(seconds: Callable[[int], float]) -> float:
    """Plain steps that one text may lose: as many as a rejected draft of the cheapest usual size loses, but 1 to 2.

    `seconds` maps rows of a forward to its time. Less would forbid all drafts if more rows are expensive.
    """
    cheapest_s = min(seconds(rows) for rows in _USUAL_ROWS)
    return min(max(_LEAST_ALLOWED, cheapest_s / seconds(1) - 1.0), _MOST_ALLOWED)


class RegretBudget:
    """The account of one generation, in plain steps: one plain step is the time of a forward without a draft.

    Whatever is drafted, the loss stays below twice the allowed loss plus `_ALLOWED_SHARE` of the time and `_LENT_SHARE`
    of what blocked drafts would have gained.
    """

    def __init__(self, allowed: float) -> None:
        """`allowed`: see `choose_allowed_loss`."""
        self._allowed = allowed
        self._balance = 0.0
        self._credit = 0.0  # the part of the balance that shadow drafts have lent
        self._shadow_balance = 0.0  # what shadow drafts would have lost and not yet won back; at most 0
        self._read_debt = 0.0  # reading of drafters that is not yet charged
        self._elapsed = 0.0

    def add_reading(self, steps: float) -> None:
        """Drafters have read text for `steps` plain steps, which the next rounds are charged for."""
        self._read_debt += steps

    def add(self, tokens: int, steps: float) -> None:
        """A round emitted `tokens` in a usual time of `steps` plain steps. Its gain repays the credit first."""
        charged = self._read_debt / _READ_ROUNDS
        self._read_debt -= charged
        steps += charged
        self._elapsed += steps
        gain = tokens - steps
        repaid = min(max(gain, 0.0), self._credit)
        self._credit -= repaid
        self._balance = min(self._balance + gain - repaid, _MAX_SAVINGS)

    def add_shadow(self, tokens: int, steps: float) -> None:
        """A draft that the budget did not allow would have emitted `tokens` in `steps` plain steps.

        Once the gains of such drafts outweigh their losses, the surplus is lent to the next rounds, up to the allowed
        loss, and a part of it beyond that. Their losses cost no time and reduce nothing.
        """
        balance = self._shadow_balance + tokens - steps
        self._shadow_balance = min(max(balance, -self._allowed), 0.0)
        lent = max(_LENT_SHARE * balance, min(balance, self._allowed - self._credit))
        lent = min(lent, self._allowed - self._balance)
        if lent > 0:
            self._balance += lent
            self._credit += lent

    def allowance(self, n_peers: int = 0) -> float:
        """Plain steps that the next round may lose if its whole draft is rejected.

        Generations that share their forwards also share the initial allowance: with `n_peers` others each has its part.
        """
        return self._balance + _ALLOWED_SHARE * self._elapsed + self._allowed / (1 + n_peers)
