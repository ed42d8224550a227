"""Exact enumeration of verification: a RandomSource that explores every decision, with distributions in fractions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

from edgespec.core.arrays import Ints, Probs
from edgespec.core.protocols import NO_DRAFT, Draft, Verifier
from edgespec.core.rng import RandomSource
from edgespec.core.sampling import Distribution
from edgespec.core.tree import path_to

T = TypeVar("T")
Tokens = tuple[int, ...]
PROMPT: Tokens = (1, 0)


class Enumerated:
    """A RandomSource that replays `script`, then takes the first possible branch of every further decision.

    After a run, `weight` is the probability of the branch that was taken and `untaken` the scripts of its siblings.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = list(script)
        self._at = 0
        self.weight = Fraction(1)
        self.untaken: list[Sequence[int]] = []

    def accept(self, p: Fraction, q: Fraction) -> bool:
        assert q > 0, "a token that its own distribution cannot draw"
        yes = min(Fraction(1), p / q)
        return self.branch([1 - yes, yes]) == 1

    def choose(self, weights: Probs, position: int) -> int:
        assert min(weights) >= 0
        total = sum(weights)
        return self.branch([Fraction(w) / total for w in weights])

    def branch(self, probabilities: Sequence[Fraction]) -> int:
        if self._at == len(self._script):
            possible = [i for i, p in enumerate(probabilities) if p > 0]
            self.untaken += [(*self._script, i) for i in possible[1:]]
            self._script.append(possible[0])
        taken = self._script[self._at]
        self._at += 1
        self.weight *= probabilities[taken]
        return taken


def outcomes(
    run: Callable[[Enumerated], T], random_source: type[Enumerated] = Enumerated
) -> Iterator[tuple[Fraction, T]]:
    """Every result of `run` with its probability, by running it once for each way its decisions can go."""
    scripts: list[Sequence[int]] = [()]
    while scripts:
        one = random_source(scripts.pop())
        result = run(one)
        scripts += one.untaken
        yield one.weight, result


def normalised(weights: Sequence[Fraction] | Probs) -> Probs:
    """[V] object array of fractions that sum to 1; all zeros stay so."""
    total = sum(weights)
    return np.array([Fraction(w) / total if total else Fraction(0) for w in weights], object)


class Table:
    """A random distribution of `vocab_size` tokens after each prefix: integers over their sum, zeros if `low` is 0."""

    def __init__(self, seed: int, vocab_size: int = 3, low: int = 1) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._low = low
        self._rows: dict[Tokens, Probs] = {}

    def __call__(self, prefix: Sequence[int]) -> Probs:
        key = tuple(prefix)
        if key not in self._rows:
            rng = np.random.default_rng((self._seed, len(key), *key))
            weights = rng.integers(self._low, 7 if self._low else 3, self.vocab_size)
            weights[rng.integers(self.vocab_size)] += 1  # never all zero
            self._rows[key] = normalised([Fraction(int(w)) for w in weights])
        return self._rows[key]


class Target:
    """The target: one factor of its distribution comes through the logits (the row), the other through the context.

    So a verifier that reads the wrong row, or forgets to extend the context, gets another distribution. Zeros make it
    sparse, as truncation does.
    """

    window = 99
    row_params = None

    def __init__(self, seed: int, vocab_size: int = 3, low: int = 1) -> None:
        self.vocab_size = vocab_size
        self.logits = Table(seed, vocab_size, low)
        self._context = Table(seed + 1000, vocab_size)
        self._p: dict[Tokens, Probs] = {}

    def distribution(self, logits: Probs, prefix: Sequence[int]) -> Distribution:
        weights = logits * self._context(prefix)
        ids = np.flatnonzero(weights).astype(np.int32)
        return Distribution(None, weights) if len(ids) == len(weights) else Distribution(ids, weights[ids])

    def p(self, prefix: Sequence[int]) -> Probs:
        key = tuple(prefix)
        if key not in self._p:
            self._p[key] = normalised(self.logits(key) * self._context(key))
        return self._p[key]

    def probability(self, tokens: Tokens) -> Fraction:
        """Of `tokens` after the prompt."""
        result = Fraction(1)
        for i, token in enumerate(tokens):
            result *= self.p(PROMPT + tokens[:i])[token]
        return result


@dataclass(frozen=True)
class Rows:
    """Scores of one forward after PROMPT."""

    target: Target
    draft: Draft

    def argmax(self) -> Ints:
        raise AssertionError("this distribution is not an argmax")

    def logits(self, row: int) -> Probs:
        path = path_to(self.draft, row - 1)
        return self.target.logits((*PROMPT, *self.draft.tokens[list(path)].tolist()))


Rule = Callable[[Target, RandomSource], Verifier]
Drafting = Callable[[Enumerated], Draft]
Proposal = Callable[[Sequence[int]], Probs]


@dataclass(frozen=True)
class Round:
    """The distribution of the tokens that one round emits, and the mean number of drafted tokens among them."""

    target: Target
    distribution: dict[Tokens, Fraction]
    accepted: Fraction

    @property
    def tv(self) -> Fraction:
        """Total variation between the target's distribution and this round, completed by plain decoding."""
        return variation(self.target, self.distribution)


def play(target: Target, rule: Rule, drafting: Drafting, random_source: type[Enumerated] = Enumerated) -> Round:
    def run(one: Enumerated) -> tuple[Tokens, int]:
        draft = drafting(one)
        verdict = rule(target, one).verify(draft, Rows(target, draft), PROMPT)  # type: ignore[arg-type]
        return (*draft.tokens[list(verdict.path)].tolist(), verdict.next_token), len(verdict.path)

    distribution: dict[Tokens, Fraction] = {}
    accepted = Fraction(0)
    for weight, (tokens, n) in outcomes(run, random_source):
        distribution[tokens] = distribution.get(tokens, Fraction(0)) + weight
        accepted += weight * n
    assert sum(distribution.values()) == 1
    return Round(target, distribution, accepted)


def variation(target: Target, distribution: dict[Tokens, Fraction]) -> Fraction:
    """Sum over all sequences as long as the longest of |distribution, continued by the target, - target| / 2."""
    length = max(map(len, distribution))

    def below(prefix: Tokens, truth: Fraction, mass: Fraction) -> Fraction:
        mass += distribution.get(prefix, Fraction(0))  # emitted exactly this: the target continues from here
        if len(prefix) == length:
            return abs(mass - truth)
        p = target.p(PROMPT + prefix)
        return sum((below((*prefix, x), truth * p[x], mass * p[x]) for x in range(len(p))), Fraction(0))

    return below((), Fraction(1), Fraction(0)) / 2


def deterministic(tokens: Sequence[int], parents: Sequence[int]) -> Drafting:
    draft = Draft(np.array(tokens, np.int32), np.array(parents, np.int32))
    return lambda random_source: draft


def sampled(
    q: Proposal, widths: Sequence[int], *, replace: bool = True, go_on: Callable[[Tokens], bool] = lambda prefix: True
) -> Drafting:
    """widths[d] children drawn from `q` below every node of depth d, i.i.d. or without replacement.

    `go_on` looks at what was drawn so far and may end a branch early.
    """

    def draw(random_source: Enumerated) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        distributions: list[Probs] = []
        level: list[tuple[int, Tokens]] = [(-1, PROMPT)]
        for width in widths:
            above, level = level, []
            for node, prefix in above:
                row = q(prefix)
                for _ in range(width if go_on(prefix) else 0):
                    if not any(row):
                        break
                    x = random_source.choose(row, 0)
                    level.append((len(tokens), (*prefix, x)))
                    tokens.append(x)
                    parents.append(node)
                    distributions.append(row)
                    if not replace:
                        row = normalised([Fraction(0) if i == x else w for i, w in enumerate(row)])
        if not tokens:
            return NO_DRAFT
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), np.stack(distributions))

    return draw
