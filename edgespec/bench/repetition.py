"""Find where a text repeats itself or its prompt, and the speed of the rounds there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from edgespec.core.protocols import Step
from edgespec.drafters.ngram import MAX_NGRAM, SuffixLookup

_MIN_MATCH = 8  # tokens before a token that occurred earlier in the same order
_MIN_STRETCH = 16  # consecutive tokens that continue as they did earlier


def find_repetition(prompt: Sequence[int], emitted: Sequence[int]) -> list[bool]:
    """[emitted] whether each token is in a stretch that an n-gram lookup can predict."""
    lookup = SuffixLookup(min_length=MAX_NGRAM)  # longer matches are found by their ends
    lookup.extend(prompt)
    text, copied = list(prompt), []
    for token in emitted:
        text.append(token)
        copied.append(any(each.confidence >= _MIN_MATCH and each.is_right for each in lookup.extend(text)))
    found: list[bool] = []
    for is_copied, stretch in groupby(copied):
        n = len(list(stretch))
        found += [is_copied and n >= _MIN_STRETCH] * n
    return found


def repeated_share(tokens: Sequence[int | None], n: int = 4) -> float:
    """The share of a text's n-grams that it has had before; None, an unknown token, is in no n-gram."""
    grams = [gram for i in range(len(tokens) - n + 1) if None not in (gram := tuple(tokens[i : i + n]))]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def repetition_speed(prompt: Sequence[int], steps: Sequence[Step]) -> tuple[int, float]:
    """(tokens, seconds) of the rounds that start in a repeated stretch.

    The last round counts in full, with its tokens after the end of the stretch and its rejected drafts.
    """
    repeats = find_repetition(prompt, [token for step in steps for token in step.tokens])
    tokens, seconds, at = 0, 0.0, 0
    for before, step in pairwise(steps):
        at += len(before.tokens)
        if repeats[at]:
            tokens += len(step.tokens)
            seconds += step.at_s - before.at_s
    return tokens, seconds
