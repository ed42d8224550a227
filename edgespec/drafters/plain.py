"""The drafter of plain decoding, which proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Verdict
from edgespec.core.scores import Scores


class PlainDrafter:
    name = "none"

    def begin(self, prompt: Sequence[int], scores: Scores) -> None: ...

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        return NO_DRAFT

    def observe(self, verdict: Verdict, scores: Scores) -> None: ...
