"""How many nodes and levels a draft may have, and which number is expected to pay most.

The worth of a round is

    value = expected tokens - price * seconds

`price` is in tokens per second: the rate at which the time could emit tokens otherwise. To maximise tokens per second
over many rounds is to maximise this difference in each of them (renewal reward; Dinkelbach 1967 for the ratio).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

MAX_NODES = 63  # draft nodes; a forward then has at most 64 rows
COUNTS = (*range(16), 19, 23, 27, 31, 39, 47, 55, MAX_NODES)  # that are compared: costs of more rows are interpolated


class DraftSize(NamedTuple):
    """A number of draft nodes to verify: tokens the round is expected to emit, and its seconds, drafting included."""

    nodes: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def value(self, price: float) -> float:
        """The value in tokens; `price` is in tokens per second."""
        return self.tokens - price * self.seconds


def list_counts(limit: int) -> list[int]:
    """The numbers of draft nodes up to `limit`, 0 included, that are compared.

    None up to 15 is skipped, since cost curves have steps in both directions.
    """
    counts = [*COUNTS[: bisect_right(COUNTS, limit)]]
    return counts if counts[-1] == limit else [*counts, limit]


def list_sizes(
    probabilities: Sequence[float], verify_s: Callable[[int], float], drafted_s: float, max_nodes: int
) -> list[DraftSize]:
    """Sizes up to `max_nodes`, each of the most probable nodes; `verify_s` maps rows of a forward to seconds."""
    tokens = list(accumulate(sorted(probabilities, reverse=True)[:max_nodes], initial=1.0))
    return [DraftSize(n, tokens[n], drafted_s + verify_s(n + 1)) for n in list_counts(len(tokens) - 1)]


def choose_size(candidates: Sequence[DraftSize], recent_rate: float) -> tuple[DraftSize, float]:
    """The size of the highest value, and the price of a second in tokens.

    The price is the higher of the best speed among `candidates` and `recent_rate`, the tokens per second of recent
    rounds. A token left out of this draft can still be drafted in the next round, when more of the text is known.
    """
    price = max(recent_rate, max([tokens / seconds for _, tokens, seconds in candidates]))
    return max(candidates, key=lambda each: each[1] - price * each[2]), price
