"""Prompt and history lookup (prompt lookup decoding, Saxena 2023): what followed before follows again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Verdict
from edgespec.core.scores import Scores

LONGEST = 5  # n-gram sizes in the index
MOST_LENGTH = 64  # a longer match counts as that long
_REMEMBERED = 8  # most recent occurrences kept for each n-gram


class SuffixLookup:
    """An index of the text so far. `end` is the position after the match, `length` how many tokens match (0: none)."""

    def __init__(self, shortest: int = 2) -> None:
        """`shortest` is the least number of tokens that a match has."""
        self._shortest = shortest
        self.tokens: list[int] = []
        self.end = 0
        self.length = 0
        self._ends: dict[tuple[int, ...], deque[int]] = {}  # n-gram -> positions right after it

    def extend(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """Take in what `tokens`, the whole text, has beyond the last call.

        Returns for each new token that a match foretold: (length of the match, whether the token was right).
        """
        outcomes: list[tuple[int, bool]] = []
        for position in range(len(self.tokens), len(tokens)):
            token = tokens[position]
            right = self.length > 0 and self.tokens[self.end] == token
            if self.length:
                outcomes.append((self.length, right))
            # The n-grams that end before `position` become useful once there is a token after them.
            for n in range(self._shortest, min(LONGEST, position) + 1):
                gram = tuple(self.tokens[-n:])
                ends = self._ends.get(gram)
                if ends is None:
                    ends = self._ends[gram] = deque(maxlen=_REMEMBERED)
                ends.append(position)
            self.tokens.append(token)
            if right:
                self.end, self.length = self.end + 1, min(self.length + 1, MOST_LENGTH)
            else:
                self.end, self.length = self._longest(self.tokens)
        return outcomes

    def continuation(self, end: int, n: int, more: Sequence[int] = ()) -> list[int]:
        """[n] tokens from position `end` on of the text and `more`. Beyond their end the copy goes on into itself."""
        path = self.tokens[end : end + n]
        if len(path) < n:
            path += more
            for i in range(n - len(path)):
                path.append(path[i])
        return path[:n]

    def after(self, more: Sequence[int], n: int) -> tuple[list[int], int]:
        """What follows if the text goes on with `more`: ([n] tokens or none, length of the match)."""
        tokens = [*self.tokens[-MOST_LENGTH:], *more]
        end, length = self._longest(tokens)
        return (self.continuation(end, n, more), length) if length else ([], 0)

    def matches(self) -> Iterator[int]:
        """Positions whose preceding tokens match the end of the text: longest n-gram first, then latest first."""
        tried = set()
        for n in range(min(LONGEST, len(self.tokens)), self._shortest - 1, -1):
            for end in reversed(self._ends.get(tuple(self.tokens[-n:]), ())):
                if end not in tried:
                    tried.add(end)
                    yield end

    def _longest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(end, length) of the longest match of the end of `tokens` within the text, the latest of equals."""
        for n in range(min(LONGEST, len(tokens)), self._shortest - 1, -1):
            ends = self._ends.get(tuple(tokens[-n:]))
            if ends:
                lengths = [(self._length(tokens, end, n), end) for end in ends] if n == LONGEST else [(n, ends[-1])]
                length, end = max(lengths)
                return end, length
        return 0, 0

    def _length(self, tokens: Sequence[int], end: int, known: int) -> int:
        """How many tokens before `end` equal the end of `tokens`, of which `known` are known to."""
        n, most = known, min(MOST_LENGTH, len(tokens), end)
        while n < most and self.tokens[end - n - 1] == tokens[-n - 1]:
            n += 1
        return n


class NgramDrafter:
    """Deterministic drafts from the tokens seen so far; needs no model.

    A budget of more nodes than depth takes several continuations, the longest and then the latest match first, merged
    into a tree.
    """

    name = "ngram"
    hidden_layers: frozenset[int] = frozenset()

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
        for end in self._lookup.matches():
            if len(chosen) == budget.nodes:
                break
            node = -1
            for token in self._lookup.continuation(end, budget.depth):
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
