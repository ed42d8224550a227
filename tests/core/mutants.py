"""Plausible bugs of verification: the rules restated with one step replaced, so that the proofs can be seen to fail."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from edgespec.core.arrays import Probs
from edgespec.core.protocols import Draft, Verdict
from edgespec.core.rng import RandomSource
from edgespec.core.scores import Scores
from tests.core.enumerate import Enumerated, Target


def positive(x: Probs) -> Probs:
    result: Probs = np.maximum(x, 0)
    return result


def rest(p: Probs, q: Probs) -> Probs:
    owed = positive(p - q)
    return owed / owed.sum() if owed.sum() else p


class Restated:
    def __init__(self, target: Target, random_source: RandomSource) -> None:
        self.target = target
        self.random_source = random_source

    def distribution(self, scores: Scores, node: int, context: Sequence[int]) -> Probs:
        return self.target.distribution(scores.logits(node + 1), context).dense(self.target.vocab_size)


class TargetRule(Restated):
    def find(self, draft: Draft, node: int, y: int) -> int | None:
        return next((c for c in draft.children(node) if draft.tokens[c] == y), None)

    def emit(self, p: Probs, y: int) -> int:
        return y

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        context, path, node = list(prefix), [], -1
        while True:
            p = self.distribution(scores, node, context)
            y = self.random_source.choose(p, 0)
            child = self.find(draft, node, y)
            if child is None:
                return Verdict(tuple(path), self.emit(p, y))
            node = child
            path.append(child)
            context.append(y)


class DrawsAgainOnMismatch(TargetRule):
    def emit(self, p: Probs, y: int) -> int:
        return self.random_source.choose(p, 0)


class ReadsTheParentsRow(TargetRule):
    def distribution(self, scores: Scores, node: int, context: Sequence[int]) -> Probs:
        return super().distribution(scores, max(node - 1, -1), context)


class ForgetsAcceptedTokens(TargetRule):
    def distribution(self, scores: Scores, node: int, context: Sequence[int]) -> Probs:
        return super().distribution(scores, node, context[:2])


class DescendsToCousins(TargetRule):
    def find(self, draft: Draft, node: int, y: int) -> int | None:
        return next((c for c in range(node + 1, len(draft)) if draft.tokens[c] == y), None)


class TokenRule(Restated):
    def accept(self, p: Probs, q: Probs, x: int) -> bool:
        return self.random_source.accept(p[x], q[x])

    def owed(self, p: Probs, draft: Draft, child: int) -> Probs:
        return rest(p, draft.q[child])  # type: ignore[index]

    def last(self, p: Probs, start: Probs, draft: Draft, node: int) -> Probs:
        return p

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        context, path, node = list(prefix), [], -1
        while True:
            p = start = self.distribution(scores, node, context)
            for child in draft.children(node):
                x = int(draft.tokens[child])
                if self.accept(p, draft.q[child], x):  # type: ignore[index]
                    node = child
                    path.append(child)
                    context.append(x)
                    break
                p = self.owed(p, draft, child)
            else:
                return Verdict(tuple(path), self.random_source.choose(self.last(p, start, draft, node), 0))


class InvertsTheRatio(TokenRule):
    def accept(self, p: Probs, q: Probs, x: int) -> bool:
        return self.random_source.accept(q[x], p[x])


class LeavesResidualUnnormalised(TokenRule):
    def owed(self, p: Probs, draft: Draft, child: int) -> Probs:
        left = positive(p - draft.q[child])  # type: ignore[index]
        return left if left.sum() else p


class JudgesSiblingsIndependently(TokenRule):
    def owed(self, p: Probs, draft: Draft, child: int) -> Probs:
        return p

    def last(self, p: Probs, start: Probs, draft: Draft, node: int) -> Probs:
        children = draft.children(node)
        return rest(start, draft.q[children[0]]) if children else p  # type: ignore[index]


class UsesAnothersQ(TokenRule):
    def owed(self, p: Probs, draft: Draft, child: int) -> Probs:
        return rest(p, draft.q[0])  # type: ignore[index]


class CorrectsFromP(TokenRule):
    def last(self, p: Probs, start: Probs, draft: Draft, node: int) -> Probs:
        return start


class DrawsBonusFromQ(TokenRule):
    def last(self, p: Probs, start: Probs, draft: Draft, node: int) -> Probs:
        return draft.q[node] if node == len(draft) - 1 else p  # type: ignore[index,no-any-return]


class BlockRule(Restated):
    def clip(self, product: Fraction) -> Fraction:
        return min(Fraction(1), product)

    def height(self, keep: Fraction, z: Fraction) -> Fraction:
        total = z + 1 - keep
        return z / total if total else Fraction(1)

    def depth(self, heights: Sequence[Fraction]) -> int:
        return max((i for i, h in enumerate(heights, 1) if self.random_source.accept(h, Fraction(1))), default=0)

    def owed(self, keep: Fraction, p: Probs, q: Probs) -> Probs:
        return positive(keep * p - q)

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        tokens, k = draft.tokens.tolist(), len(draft)
        p = [self.distribution(scores, i - 1, [*prefix, *tokens[:i]]) for i in range(k + 1)]
        keep = [Fraction(1)]
        for i, x in enumerate(tokens):
            keep.append(self.clip(keep[i] * p[i][x] / draft.q[i][x]))  # type: ignore[index]
        owed = [self.owed(keep[i], p[i], draft.q[i]) for i in range(k)] + [p[k]]  # type: ignore[index]
        heights = [self.height(keep[i], positive(keep[i] * p[i] - draft.q[i]).sum()) for i in range(1, k)]  # type: ignore[index]
        tau = self.depth([*heights, keep[k]] if k else [])
        weights = owed[tau] if owed[tau].sum() else p[tau]
        return Verdict(tuple(range(tau)), self.random_source.choose(weights, 0))


class BreaksAtFirstRejection(BlockRule):
    def depth(self, heights: Sequence[Fraction]) -> int:
        for i, h in enumerate(heights):
            if not self.random_source.accept(h, Fraction(1)):
                return i
        return len(heights)


class NeverKeepsTheWholeBlock(BlockRule):
    def depth(self, heights: Sequence[Fraction]) -> int:
        return super().depth(heights[:-1])


class StopsOneShort(BlockRule):
    def depth(self, heights: Sequence[Fraction]) -> int:
        return max(0, super().depth(heights) - 1)


class AcceptsByTheProductAlone(BlockRule):
    def height(self, keep: Fraction, z: Fraction) -> Fraction:
        return keep


class OwesWithoutTheProduct(BlockRule):
    def owed(self, keep: Fraction, p: Probs, q: Probs) -> Probs:
        return positive(p - q)


class ForgetsToClip(BlockRule):
    def clip(self, product: Fraction) -> Fraction:
        return product

    def height(self, keep: Fraction, z: Fraction) -> Fraction:
        return min(Fraction(1), super().height(min(keep, Fraction(1)), z))


class OneUniform(Enumerated):
    """The same random number for every decision of the round, known ever more closely: a value in [low, high)."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        super().__init__(script)
        self._low, self._high = Fraction(0), Fraction(1)

    def accept(self, p: Fraction, q: Fraction) -> bool:
        return self._pick([min(Fraction(1), p / q), Fraction(1)]) == 0

    def choose(self, weights: Probs, position: int) -> int:
        if position == 0:  # a drafted token: the drafter's randomness is its own
            return super().choose(weights, position)
        return self._pick(list(np.cumsum(weights) / sum(weights)))

    def _pick(self, borders: Sequence[Fraction]) -> int:
        edges = [min(max(b, self._low), self._high) for b in (Fraction(0), *borders)]
        width = self._high - self._low
        taken = self.branch([(b - a) / width for a, b in pairwise(edges)])
        self._low, self._high = edges[taken], edges[taken + 1]
        return taken
