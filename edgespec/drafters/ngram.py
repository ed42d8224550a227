"""Prompt lookup decoding (Saxena 2023): drafts the tokens that followed an earlier occurrence of the text's end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Verdict
from edgespec.core.scores import Scores

MAX_NGRAM = 5  # n-gram sizes in the index
MAX_MATCH = 64  # tokens; longer matches count as this long
_MAX_OCCURRENCES = 8  # most recent occurrences kept for each n-gram


class SuffixLookup:
    """An n-gram index of the text, and the longest earlier match of the text's end.

    end     the position after the match
    length  its number of tokens; 0 without a match
    """

    def __init__(self, min_length: int = 2) -> None:
        """`min_length`: the minimum number of tokens of a match."""
        self._min_length = min_length
        self.tokens: list[int] = []
        self.end = 0
        self.length = 0
        self._ends: dict[tuple[int, ...], deque[int]] = {}  # n-gram -> positions right after it

    def extend(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """Add the tokens that `tokens`, the whole text, has beyond the last call.

        Returns (length of the match, whether it predicted the token) for each new token that followed a match.
        """
        outcomes: list[tuple[int, bool]] = []
        for position in range(len(self.tokens), len(tokens)):
            token = tokens[position]
            right = self.length > 0 and self.tokens[self.end] == token
            if self.length:
                outcomes.append((self.length, right))
            # An n-gram is indexed once a token follows it.
            for n in range(self._min_length, min(MAX_NGRAM, position) + 1):
                gram = tuple(self.tokens[-n:])
                ends = self._ends.get(gram)
                if ends is None:
                    ends = self._ends[gram] = deque(maxlen=_MAX_OCCURRENCES)
                ends.append(position)
            self.tokens.append(token)
            if right:
                self.end, self.length = self.end + 1, min(self.length + 1, MAX_MATCH)
            else:
                self.end, self.length = self._find_longest(self.tokens)
        return outcomes

    def read_continuation(self, end: int, n: int, more: Sequence[int] = ()) -> list[int]:
        """[n] tokens from position `end` of the text and `more`; wraps around where the match overlaps the end."""
        path = self.tokens[end : end + n]
        if len(path) < n:
            path += more
            for i in range(n - len(path)):
                path.append(path[i])
        return path[:n]

    def continue_after(self, more: Sequence[int], n: int) -> tuple[list[int], int]:
        """The continuation if `more` followed the text: ([n] tokens or none, length of the match)."""
        tokens = [*self.tokens[-MAX_MATCH:], *more]
        end, length = self._find_longest(tokens)
        return (self.read_continuation(end, n, more), length) if length else ([], 0)

    def find_matches(self) -> Iterator[int]:
        """Positions after a match of the text's end: longest n-gram first, then latest first."""
        seen = set()
        for n in range(min(MAX_NGRAM, len(self.tokens)), self._min_length - 1, -1):
            for end in reversed(self._ends.get(tuple(self.tokens[-n:]), ())):
                if end not in seen:
                    seen.add(end)
                    yield end

    def _find_longest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(end, length) of the longest match of the end of `tokens` within the text; the latest of equal ones."""
        for n in range(min(MAX_NGRAM, len(tokens)), self._min_length - 1, -1):
            ends = self._ends.get(tuple(tokens[-n:]))
            if ends and n < MAX_NGRAM:
                return ends[-1], n
            if ends:
                length, end = max((self._extend_match(tokens, end, n), end) for end in ends)
                return end, length
        return 0, 0

    def _extend_match(self, tokens: Sequence[int], end: int, known: int) -> int:
        """The number of tokens before `end` that equal the end of `tokens`; at least `known`."""
        n, limit = known, min(MAX_MATCH, len(tokens), end)
        while n < limit and self.tokens[end - n - 1] == tokens[-n - 1]:
            n += 1
        return n


class NgramDrafter:
    """Deterministic drafts from the prompt and the output; needs no model.

    A budget with more nodes than depth merges the continuations of several matches into a tree, longest and latest
    match first.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._lookup = SuffixLookup()

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._lookup = SuffixLookup()
        self._lookup.extend(prompt)

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        self._lookup.extend(tokens)
        chosen: list[int] = []
        parents: list[int] = []
        child: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for end in self._lookup.find_matches():
            if len(chosen) == budget.nodes:
                break
            node = -1
            for token in self._lookup.read_continuation(end, budget.depth):
                known = child.get((node, token))
                if known is None:
                    if len(chosen) == budget.nodes:
                        break
                    known = child[node, token] = len(chosen)
                    chosen.append(token)
                    parents.append(node)
                node = known
            if budget.nodes <= budget.depth:
                break  # a chain: the best match alone
        if not chosen:
            return NO_DRAFT
        return Draft(np.array(chosen, np.int32), np.array(parents, np.int32))

    def observe(self, verdict: Verdict, scores: Scores) -> None: ...
