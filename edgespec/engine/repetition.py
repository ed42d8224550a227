"""Detection of an answer that repeats itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.errors import InvalidRequest

_MAX_PATTERN = 4096  # tokens; each token of an answer is compared with as many


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """When an answer counts as repeating itself: its end is one pattern of tokens, several times in a row.

    The names are vLLM's. `min_tokens` is how many tokens all copies have together at least, so that a line of dashes
    or a row of a table is no reason to end. Raises InvalidRequest for sizes and counts out of range.
    """

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_pattern_size <= self.max_pattern_size <= _MAX_PATTERN or self.min_count < 2:
            raise InvalidRequest(
                f"repetition_detection has patterns of {self.min_pattern_size} to {self.max_pattern_size} tokens, "
                f"{self.min_count} times.",
                hint=f"Patterns have 1 to {_MAX_PATTERN:,} tokens; min_count is at least 2.",
            )


ENDLESS = RepetitionDetection(max_pattern_size=512, min_count=4, min_tokens=256)
"""Detects repetition that is too long for anybody to read on."""


class RepetitionDetector:
    """Follows an answer token by token."""

    def __init__(self, detection: RepetitionDetection) -> None:
        longest = detection.max_pattern_size
        sizes = np.arange(1, longest + 1)
        # A pattern of p tokens, n times, is a run of (n - 1) * p tokens that each equal the one p tokens before.
        needed = np.maximum((detection.min_count - 1) * sizes, detection.min_tokens - sizes)
        self._needed = np.where(sizes < detection.min_pattern_size, np.iinfo(np.int64).max, needed)
        self._runs = np.zeros(longest, np.int64)  # of each size of a pattern
        self._tokens = np.full(2 * longest, -1, np.int64)
        self._n = longest

    def take(self, token: int) -> bool:
        """Add a token; returns whether the answer repeats itself with it."""
        longest = len(self._runs)
        if self._n == len(self._tokens):
            self._tokens[:longest] = self._tokens[longest:]
            self._n = longest
        is_equal = self._tokens[self._n - longest : self._n][::-1] == token
        self._runs += 1
        self._runs *= is_equal
        self._tokens[self._n] = token
        self._n += 1
        return bool((self._runs >= self._needed).any())
