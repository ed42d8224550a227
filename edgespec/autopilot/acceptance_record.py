"""How often the tokens of a drafter were accepted, over all answers."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.units import count

LEAST_REACHED = 0.03  # probability that the next token of a chain is reached
_KEPT = 0.8  # weight of an answer beside the next one
_HOPELESS = 0.05  # below it a draft model probably does not belong to the target
_MANY_ANSWERS, _MANY_TESTED = 20, 200  # answers and tested tokens from which on a low share is no accident
_ENOUGH_TESTED = 20  # tested tokens from which on a hopeless share is none


@dataclass(frozen=True, slots=True)
class AcceptanceRecord:
    """How often the best proposals of a drafter were accepted in all answers that it was asked for.

    recent   the share in the last answers; each counts `_KEPT` times as much as the next one
    is_told  whether the user has heard that it is low
    """

    answers: int = 0
    accepted: int = 0
    tested: int = 0
    recent: float = 0.0
    is_told: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for counts that cannot be."""
        if not (0 <= self.accepted <= self.tested and 0 <= self.answers <= self.tested and 0 <= self.recent <= 1):
            raise ValueError("more tokens accepted than tested")

    @property
    def share(self) -> float:
        """The share of accepted tokens in all answers."""
        return self.accepted / self.tested if self.tested else 0.0

    def is_low(self, pays_from: float) -> bool:
        """Whether the acceptance rate is too low: below `pays_from` over many answers, or near zero over a few.

        `pays_from`: the lowest acceptance rate at which a chain is faster than plain decoding.
        """
        if self.tested >= _ENOUGH_TESTED and self.share < _HOPELESS:
            return True
        return self.answers >= _MANY_ANSWERS and self.tested >= _MANY_TESTED and self.share < pays_from

    def add(self, accepted: int, tested: int) -> AcceptanceRecord:
        """The record with one more answer, in which `accepted` of `tested` tokens were accepted."""
        share = accepted / tested
        recent = _KEPT * self.recent + (1 - _KEPT) * share if self.answers else share
        counts = self.answers + 1, self.accepted + accepted, self.tested + tested
        return AcceptanceRecord(*counts, recent, self.is_told)

    def describe(self, name: str) -> str:
        """A sentence for the user about the drafter that he calls `name`, without its full stop."""
        return f"drafts of {name} are accepted {self.share:.0%} of the time over {count(self.answers, 'answer')}"
