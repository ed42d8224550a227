"""The exact acceptance rules. Each leaves the target's distribution unchanged; tests/core proves it by enumeration.

p is the target's law after the whole sampler chain, q the law a drafted token was actually drawn from.
A row's law is computed only when the rule visits that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgespec.core.arrays import Logits, Probs
from edgespec.core.protocols import Draft, Scores, Verdict, Verifier
from edgespec.core.rng import RandomSource
from edgespec.core.sampling import Distribution, SamplingParams
from edgespec.core.tree import depths


class TargetDistribution(Protocol):
    """What a verifier needs of `sampling.Sampler`."""

    window: int

    @property
    def is_argmax(self) -> bool: ...

    @property
    def row_params(self) -> SamplingParams | None: ...

    def distribution(self, logits: Logits, prefix: Sequence[int]) -> Distribution: ...


class SampleMatching:
    """For deterministic children: draw y from the target; if y was drafted, descend, else emit y.

    Exact and maximal for the child set, since the emitted token is the target's own draw at every position. With
    `Seeded` chance that draw depends on the position alone: a seed gives the text that plain decoding gives.
    """

    def __init__(self, sampler: TargetDistribution, random_source: RandomSource) -> None:
        self._sampler = sampler
        self._random_source = random_source

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        if draft.q is not None:
            raise ValueError("a sampled draft needs TokenRejection or BlockVerification")
        decided = self._decided(draft, scores, len(prefix))
        context = _context(prefix, self._sampler.window)
        path: list[int] = []
        node = -1
        while True:
            y = decided[node + 1] if decided else -1
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

    def _decided(self, draft: Draft, scores: Scores, position: int) -> list[int] | None:
        """[rows] what a runtime can tell without handing out its logits, -1 where it cannot."""
        if self._sampler.is_argmax:
            best: list[int] = scores.argmax().tolist()
            return best
        params = self._sampler.row_params
        if params is None:
            return None
        uniforms = [self._random_source.uniform(position + depth) for depth in (0, *depths(draft).tolist())]
        drawn = scores.draw(params, uniforms)
        return None if drawn is None else drawn.tolist()


class TokenRejection:
    """Speculative sampling for drawn tokens: chains (Leviathan et al. 2023; Chen et al. 2023) and sibling sets
    (recursive rejection: Miao et al. 2024, SpecInfer).

    Siblings drawn without replacement carry their conditional q: the law given that the earlier ones were not drawn.
    """

    def __init__(self, sampler: TargetDistribution, random_source: RandomSource) -> None:
        self._sampler = sampler
        self._random_source = random_source

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        context = _context(prefix, self._sampler.window)
        path: list[int] = []
        node = -1
        while True:
            p = _dense(self._sampler, scores, node + 1, context)  # [V]
            for child in draft.children(node):
                q, x = _q(draft, child), int(draft.tokens[child])
                if self._random_source.accept(p[x], q[x]):
                    node = child
                    path.append(child)
                    context.append(x)
                    break
                p = residual(p, q)
            else:
                return Verdict(tuple(path), self._random_source.choose(p, len(prefix) + len(path)))


class BlockVerification:
    """Joint verification of a sampled chain (Sun et al., ICLR 2025, 2403.10444): accepts no less than the token rule.

    P_0 = 1;  P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))
    i < k:  Z_i = sum(max(P_i p_{i+1} - q_{i+1}, 0));  h_i = Z_i / (Z_i + 1 - P_i), 0/0 -> 1;   h_k = P_k
    tau = the largest i whose own coin shows acceptance with h_i (no early break), else 0
    next ~ p_{k+1} after tau = k, else the normalised max(P_tau p_{tau+1} - q_{tau+1}, 0)
    """

    def __init__(self, sampler: TargetDistribution, random_source: RandomSource) -> None:
        self._sampler = sampler
        self._random_source = random_source

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        if not draft.is_chain:
            raise ValueError("block verification takes chains; use TokenRejection for sibling sets")
        context = _context(prefix, self._sampler.window)
        k = len(draft)
        p = [_dense(self._sampler, scores, 0, context)]  # p[i]: the law after x_1..x_i, [V]
        keep = [p[0].sum()]  # P_i; starts at one, in the laws' own number type
        for i, x in enumerate(draft.tokens.tolist()):
            keep.append(min(keep[0], keep[i] * p[i][x] / _q(draft, i)[x]))
            context.append(x)
            p.append(_dense(self._sampler, scores, i + 1, context))
        owed = [_positive(keep[i] * p[i] - _q(draft, i)) for i in range(k)] + [p[k]]
        tau = 0
        for i in range(1, k + 1):
            z = owed[i].sum() if i < k else keep[k]
            total = z + 1 - keep[i] if i < k else 1
            if total <= 0 or self._random_source.accept(z, total):
                tau = i
        weights = owed[tau] if owed[tau].sum() > 0 else p[tau]  # nothing owed: p = q here, reached by rounding alone
        return Verdict(tuple(range(tau)), self._random_source.choose(weights, len(prefix) + tau))


class AutoVerifier:
    """For generations in which some drafts are drawn at random and others are not: each by the rule made for it."""

    def __init__(self, deterministic: Verifier, drawn: Verifier) -> None:
        self._deterministic = deterministic
        self._drawn = drawn

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        rule = self._deterministic if draft.q is None else self._drawn
        return rule.verify(draft, scores, prefix)


def residual(p: Probs, q: Probs) -> Probs:
    """norm(max(p - q, 0)): what the target still owes after a token drawn from q was rejected. [V]

    p itself where nothing is owed, which only rounding can reach: then p = q, and q's draw is never rejected.
    """
    r = _positive(p - q)
    total = r.sum()
    return r / total if total > 0 else p


def _positive(x: Probs) -> Probs:
    positive: Probs = np.maximum(x, 0)
    return positive


def _q(draft: Draft, node: int) -> Probs:
    if draft.q is None:
        raise ValueError(
            "rejection rules need the distribution each token was drawn from; use SampleMatching for deterministic drafts"
        )
    q: Probs = draft.q[node]
    return q


def _dense(sampler: TargetDistribution, scores: Scores, row: int, context: Sequence[int]) -> Probs:
    logits = scores.logits(row)
    return sampler.distribution(logits, context).dense(len(logits))


def _context(prefix: Sequence[int], window: int) -> list[int]:
    """The part of the prefix that the sampler looks at, as a list that grows along the accepted path."""
    return list(prefix[-window:]) if window else []
