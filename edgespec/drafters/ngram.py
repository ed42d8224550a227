"""Prompt and history lookup (prompt lookup decoding, Saxena 2023): what followed before follows again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Scores, Verdict
from edgespec.drafters.lookup import SuffixLookup


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
