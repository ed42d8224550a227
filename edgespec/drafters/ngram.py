"""Prompt and history lookup (prompt lookup decoding, Saxena 2023): what followed before follows again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Scores, Verdict

_LONGEST, _SHORTEST = 5, 2  # n-gram sizes looked up, longest first
_REMEMBERED = 8  # most recent occurrences kept for each n-gram


class NgramDrafter:
    """Deterministic drafts from the tokens seen so far; needs no model.

    A budget of more nodes than depth takes several continuations, the longest and then the latest match first, merged
    into a tree.
    """

    name = "ngram"
    hidden_layers: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._ends: dict[tuple[int, ...], deque[int]] = {}  # n-gram -> positions right after it

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._seen = []
        self._ends = {}
        self._index(prompt)

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        self._index(tokens)
        chosen: list[int] = []
        parents: list[int] = []
        child: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for end in self._matches(tokens):
            if len(chosen) == budget.nodes:
                break
            node = -1
            path: list[int] = []
            for i in range(budget.depth):
                # Beyond the end of the text the copy goes on into itself: a repetition is taken to repeat.
                at = end + i - len(self._seen)
                token = path[at] if at >= 0 else self._seen[at]
                path.append(token)
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

    def _index(self, tokens: Sequence[int]) -> None:
        """Enter the tokens added since the last call, each n-gram with the position that follows it."""
        for position in range(len(self._seen), len(tokens)):
            # The n-grams that end before `position` become useful once there is a token after them.
            for n in range(_SHORTEST, min(_LONGEST, position) + 1):
                gram = tuple(tokens[position - n : position])
                ends = self._ends.get(gram)
                if ends is None:
                    ends = self._ends[gram] = deque(maxlen=_REMEMBERED)
                ends.append(position)
            self._seen.append(tokens[position])

    def _matches(self, tokens: Sequence[int]) -> Iterator[int]:
        """Positions whose preceding tokens match the end of `tokens`: longest match first, then latest first."""
        tried = set()
        for n in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            for end in reversed(self._ends.get(tuple(tokens[-n:]), ())):
                if end not in tried:
                    tried.add(end)
                    yield end
