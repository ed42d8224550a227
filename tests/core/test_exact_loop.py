"""Proof by enumeration of the whole loop: drafting, verifying and clipping keep the distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, product

import numpy as np
import pytest

from edgespec.backends.toy.session import ToySession
from edgespec.controller.fixed import FixedLength
from edgespec.controller.wrappers import Switchable
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Draft, Step, Verdict
from edgespec.core.scores import Scores
from edgespec.core.verify import AutoVerifier, BlockVerification, SampleMatching, TokenRejection
from tests.core.enumerate import (
    PROMPT,
    Enumerated,
    Proposal,
    Rule,
    Table,
    Target,
    Tokens,
    deterministic,
    outcomes,
    sampled,
)


@dataclass
class Fixed:
    """Proposes the same deterministic tree in every round, beyond the remaining length too."""

    draft: Draft

    name = "fixed"

    def begin(self, prompt: Sequence[int], scores: Scores) -> None: ...

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        return self.draft

    def observe(self, verdict: Verdict, scores: Scores) -> None: ...


@dataclass
class Drawn:
    """Draws from `q` below the history; `eager` ignores how many tokens are left to generate."""

    q: Proposal
    widths: tuple[int, ...]
    random_source: Enumerated
    eager: bool

    name = "drawn"

    def begin(self, prompt: Sequence[int], scores: Scores) -> None: ...

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        widths = self.widths if self.eager else self.widths[: budget.depth]
        return sampled(lambda prefix: self.q((*tokens, *prefix[len(PROMPT) :])), widths)(self.random_source)

    def observe(self, verdict: Verdict, scores: Scores) -> None: ...


@dataclass
class Stopping(Drawn):
    """Samples until the token 0, so that the draft length depends on the sampled tokens."""

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        drawn: list[int] = []
        distributions = []
        while len(drawn) < budget.depth and (not drawn or drawn[-1] != 0):
            distributions.append(self.q((*tokens, *drawn)))
            drawn.append(self.random_source.choose(distributions[-1], len(tokens)))
        return Draft.chain(drawn, np.stack(distributions))


def truth(target: Target, stop: frozenset[int], length: int) -> dict[Tokens, Fraction]:
    """The distribution of plain decoding: all texts that end with a stop token or have `length` tokens."""
    distribution: dict[Tokens, Fraction] = {}
    for n in range(1, length + 1):
        for tokens in product(range(target.vocab_size), repeat=n):
            if not stop & set(tokens[:-1]) and (n == length or tokens[-1] in stop) and target.probability(tokens):
                distribution[tokens] = target.probability(tokens)
    return distribution


def generated(
    target: Target,
    rule: Rule,
    drafter: Drawn | Fixed,
    stop: frozenset[int],
    length: int,
    pauses: Sequence[bool] = (False,),
) -> dict[Tokens, Fraction]:
    """The distribution of whole texts; `pauses` says, as often as it is asked, whether drafting is switched off."""

    def run(random_source: Enumerated) -> Tokens:
        if isinstance(drafter, Drawn):
            drafter.random_source = random_source
        asked = cycle(pauses)
        steps = speculate(
            ToySession(target),  # type: ignore[arg-type]
            Switchable(FixedLength(drafter, Budget(9, 9)), lambda: next(asked)),
            rule(target, random_source),
            PROMPT,
            max_tokens=length,
            stop=stop,
        )
        return tuple(token for step in steps if isinstance(step, Step) for token in step.tokens)

    distribution: dict[Tokens, Fraction] = {}
    for weight, tokens in outcomes(run):
        distribution[tokens] = distribution.get(tokens, Fraction(0)) + weight
    return distribution


@pytest.mark.parametrize("stop", [frozenset[int](), frozenset({1})])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize(
    ("tokens", "parents"), [((0, 1, 2), (-1, 0, 1)), ((2, 0, 1, 0), (-1, -1, 0, 1)), ((1, 1, 1), (-1, 0, 1))]
)
def test_deterministic_trees(tokens: Tokens, parents: Tokens, length: int, stop: frozenset[int]) -> None:
    target = Target(3, low=0)
    drafter = Fixed(deterministic(tokens, parents)(Enumerated()))
    distribution = generated(target, SampleMatching, drafter, stop, length)  # type: ignore[arg-type]
    assert distribution == truth(target, stop, length)


@pytest.mark.parametrize(("vocab_size", "length"), [(2, 4), (3, 3)])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("stop", [frozenset[int](), frozenset({1})])
@pytest.mark.parametrize(
    ("rule", "widths"), [(TokenRejection, (1, 1)), (BlockVerification, (1, 1)), (TokenRejection, (2, 1))]
)
def test_sampled_drafts(
    rule: Rule, widths: tuple[int, ...], stop: frozenset[int], eager: bool, vocab_size: int, length: int
) -> None:
    target = Target(4, vocab_size, low=vocab_size == 2)
    drafter = Drawn(Table(9, vocab_size), widths, Enumerated(), eager)
    assert generated(target, rule, drafter, stop, length) == truth(target, stop, length)


@pytest.mark.parametrize("rule", [TokenRejection, BlockVerification])
@pytest.mark.parametrize(("vocab_size", "length"), [(2, 4), (3, 3)])
def test_drafts_whose_length_depends_on_their_tokens(rule: Rule, vocab_size: int, length: int) -> None:
    target = Target(5, vocab_size, low=vocab_size == 2)
    drafter = Stopping(Table(8, vocab_size), (), Enumerated(), eager=False)
    assert generated(target, rule, drafter, frozenset(), length) == truth(target, frozenset(), length)


def test_deterministic_and_sampled_rounds() -> None:
    """Deterministic and sampled drafts in turn, each by its own rule."""
    target = Target(6, 2, low=True)

    class InTurn(Drawn):
        def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
            return super().propose(tokens, budget) if len(tokens) % 2 else Draft.chain([0, 1][: budget.depth])

    def by_draft(target: Target, random_source: Enumerated) -> AutoVerifier:
        return AutoVerifier(SampleMatching(target, random_source), BlockVerification(target, random_source))  # type: ignore[arg-type]

    drafter = InTurn(Table(3, 2), (1, 1), Enumerated(), eager=False)
    assert generated(target, by_draft, drafter, frozenset(), 4) == truth(target, frozenset(), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("pauses", [(True,), (False, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("rule", [TokenRejection, BlockVerification])
def test_drafting_switched_off_and_on(rule: Rule, pauses: tuple[bool, ...]) -> None:
    target = Target(7, 2, low=True)
    drafter = Drawn(Table(5, 2), (1, 1), Enumerated(), eager=False)
    assert generated(target, rule, drafter, frozenset(), 4, pauses) == truth(target, frozenset(), 4)
