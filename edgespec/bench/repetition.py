"""Where a text copies itself or its prompt, and how long the rounds there took."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from edgespec.core.protocols import Step
from edgespec.drafters.ngram import MAX_NGRAM, SuffixLookup

_LEAST_MATCH = 8  # tokens before the place that have been there before, in this order
_LEAST_STRETCH = 16  # tokens on end that follow as they did then


def find_repetition(prompt: Sequence[int], emitted: Sequence[int]) -> list[bool]:
    """[emitted] whether each token is part of a stretch that any lookup could foretell."""
    lookup = SuffixLookup(min_length=MAX_NGRAM)  # longer matches are found by their ends
    lookup.extend(prompt)
    text, copied = list(prompt), []
    for token in emitted:
        text.append(token)
        copied.append(any(length >= _LEAST_MATCH and right for length, right in lookup.extend(text)))
    found: list[bool] = []
    for is_copied, stretch in groupby(copied):
        n = len(list(stretch))
        found += [is_copied and n >= _LEAST_STRETCH] * n
    return found


def repetition_speed(prompt: Sequence[int], steps: Sequence[Step]) -> tuple[int, float]:
    """(tokens, seconds) of the rounds that begin in such a stretch: with what they emit behind its end, and with what
    the last of them takes for drafts that are no longer right.
    """
    repeats = find_repetition(prompt, [token for step in steps for token in step.tokens])
    tokens, seconds, at = 0, 0.0, 0
    for before, step in pairwise(steps):
        at += len(before.tokens)
        if repeats[at]:
            tokens += len(step.tokens)
            seconds += step.at_s - before.at_s
    return tokens, seconds
