"""The exact acceptance rules. Each preserves the target's distribution; tests/core proves it by enumeration.

p is the target's distribution after the whole sampler chain, q the distribution that a drafted token was sampled from.
p is computed for a row only when the rule visits that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from edgespec.core.arrays import Ints, Logits, Probs
from edgespec.core.protocols import Draft, Verdict
from edgespec.core.rng import RandomSource
from edgespec.core.sampling import Distribution, SamplingParams
from edgespec.core.scores import Scores
from edgespec.core.tree import depths


class TargetDistribution(Protocol):
    """The part of `sampling.Sampler` that verifiers use; see there."""

    window: int

    @property
    def row_params(self) -> SamplingParams | None: ...

    def distribution(self, logits: Logits, prefix: Sequence[int]) -> Distribution: ...


class SampleMatching:
    """Verifies deterministic drafts: samples y from the target, and descends if a child of the node is y, else emits y.

    Exact, since every emitted token is the target's own sample, and no exact rule accepts more of these children. With
    `CounterRng` the sample depends on seed and position alone, so that a seed gives the same text as plain decoding.
    Raises ValueError for a draft with q.
    """

    def __init__(self, sampler: TargetDistribution, random_source: RandomSource) -> None:
        self._sampler = sampler
        self._random_source = random_source

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        if draft.q is not None:
            raise ValueError("a sampled draft needs TokenRejection or BlockVerification")
        sampled = self._sample_rows(draft, scores, len(prefix))
        context = _context(prefix, self._sampler.window)
        path: list[int] = []
        node = -1
        while True:
            y = sampled[node + 1] if sampled else -1
            if y < 0:
                distribution = self._sampler.distribution(scores.logits(node + 1), context)
                y = distribution.token(self._random_source.choose(distribution.weights, len(prefix) + len(path)))
            for child in draft.children(node):
                if draft.tokens[child] == y:
                    node = child
                    path.append(child)
                    context.append(y)
                    break
            else:
                return Verdict(tuple(path), y)

    def _sample_rows(self, draft: Draft, scores: Scores, position: int) -> list[int] | None:
        """[rows] tokens sampled by the backend, -1 if it cannot decide; None if it does not sample."""
        params = self._sampler.row_params
        if params is None:
            return None
        tokens: Ints | None
        if params.temperature == 0:
            tokens = scores.argmax()
        else:
            uniforms = [self._random_source.uniform(position + depth) for depth in (0, *depths(draft).tolist())]
            tokens = scores.draw(params, uniforms)
        return None if tokens is None else tokens.tolist()


class TokenRejection(SampleMatching):
    """Speculative sampling for sampled drafts: chains (Leviathan et al. 2023; Chen et al. 2023) and trees (recursive
    rejection: Miao et al. 2024, SpecInfer).

    The q of a sibling sampled without replacement is conditional on the siblings before it. If p and q differ much, one
    of n such siblings is accepted more often than k-SEQ (Sun et al. 2023, SpecTr) accepts one of n independent samples,
    else about as often. A draft without q is verified by SampleMatching.
    """

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        if (drawn := draft.q) is None:
            return super().verify(draft, scores, prefix)
        context = _context(prefix, self._sampler.window)
        path: list[int] = []
        node = -1
        while True:
            p = self._sampler.distribution(scores.logits(node + 1), context).normalised()
            for child in draft.children(node):
                q, x = drawn[child], int(draft.tokens[child])
                if self._random_source.accept(p.weight(x), q[x]):
                    node = child
                    path.append(child)
                    context.append(x)
                    break
                p = residual(p, q)
            else:
                position = len(prefix) + len(path)
                return Verdict(tuple(path), p.token(self._random_source.choose(p.weights, position)))


class BlockVerification(SampleMatching):
    """Joint verification of a sampled chain (Sun et al., ICLR 2025, 2403.10444). It accepts at least as many tokens as
    TokenRejection does in expectation. A draft without q is verified by SampleMatching. Raises ValueError for a tree.

    P_0 = 1;  P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))
    i < k:  Z_i = sum(max(P_i p_{i+1} - q_{i+1}, 0));  h_i = Z_i / (Z_i + 1 - P_i), 0/0 -> 1;   h_k = P_k
    tau = the largest i that is accepted, each with its own probability h_i (no early break), else 0
    next ~ p_{k+1} after tau = k, else the normalised max(P_tau p_{tau+1} - q_{tau+1}, 0)
    """

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        if (q := draft.q) is None:
            return super().verify(draft, scores, prefix)
        if not draft.is_chain:
            raise ValueError("block verification takes chains; use TokenRejection for sibling sets")
        context = _context(prefix, self._sampler.window)
        k = len(draft)
        p = [self._p(scores, 0, context)]  # p[i]: after x_1..x_i
        keep = [p[0].weights.sum()]  # P_i; P_0 = 1 in the number type of p
        for i, x in enumerate(draft.tokens.tolist()):
            keep.append(min(keep[0], keep[i] * p[i].weight(x) / q[i][x]))
            context.append(x)
            p.append(self._p(scores, i + 1, context))
        residuals = [_subtract(p[i], q[i], keep[i]) for i in range(k)] + [p[k].weights]
        tau = 0
        for i in range(1, k + 1):
            z = residuals[i].sum() if i < k else keep[k]
            total = z + 1 - keep[i] if i < k else 1
            if total <= 0 or self._random_source.accept(z, total):
                tau = i
        # A residual of zero: p = q up to rounding.
        weights = residuals[tau] if residuals[tau].sum() > 0 else p[tau].weights
        return Verdict(tuple(range(tau)), p[tau].token(self._random_source.choose(weights, len(prefix) + tau)))

    def _p(self, scores: Scores, row: int, context: Sequence[int]) -> Distribution:
        return self._sampler.distribution(scores.logits(row), context).normalised()


def residual(p: Distribution, q: Probs) -> Distribution:
    """norm(max(p - q, 0)) for q [V]: the target's distribution after a token sampled from q was rejected.

    Returns p if the difference is zero. Then p = q and no token is rejected, except by rounding.
    """
    rest = _subtract(p, q)
    total = rest.sum()
    return Distribution(p.ids, rest / total) if total > 0 else p


def _subtract(p: Distribution, q: Probs, scale: Any = 1) -> Probs:
    """The weights of max(scale p - q, 0), in the order of p's."""
    rest: Probs = np.maximum(scale * p.weights - (q if p.ids is None else q[p.ids]), 0)
    return rest


def _context(prefix: Sequence[int], window: int) -> list[int]:
    """The part of the prefix that the sampler uses, as a list that grows along the accepted path."""
    return list(prefix[-window:]) if window else []
