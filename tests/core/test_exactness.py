"""Proof by rational enumeration that every acceptance rule preserves the target's distribution: TV is exactly zero."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest

from edgespec.core.arrays import Probs
from edgespec.core.protocols import Draft
from edgespec.core.tree import path_to
from edgespec.core.verify import BlockVerification, SampleMatching, TokenRejection
from tests.core.enumerate import PROMPT, Proposal, Rule, Table, Target, Tokens, deterministic, normalised, play, sampled

RULES: list[Rule] = [TokenRejection, BlockVerification]  # type: ignore[list-item]


def disjoint(target: Target) -> Proposal:
    """A distribution on the tokens that the target cannot emit; the target's own where it can emit all."""

    def q(prefix: Sequence[int]) -> Probs:
        p = target.p(prefix)
        outside = normalised([Fraction(w == 0) for w in p])
        return outside if any(outside) else p

    return q


def one_hot(target: Target) -> Proposal:
    """The distribution of a token that is certain, and seldom the target's favourite."""
    return lambda prefix: np.array([Fraction(i == sum(prefix) % 3) for i in range(3)], object)


# What p and q may look like: (target's lowest weight, the distribution that drafts)
CASES: dict[str, tuple[int, Callable[[Target], Proposal]]] = {
    "positive": (1, lambda target: Table(50)),
    "zeros in p": (0, lambda target: Table(51)),
    "zeros in q": (1, lambda target: Table(52, low=0)),
    "zeros in both": (0, lambda target: Table(53, low=0)),
    "disjoint": (0, disjoint),
    "p equals q": (1, lambda target: target.p),
    "q is certain": (1, one_hot),
}


@pytest.fixture(params=CASES, name="case")
def _case(request: pytest.FixtureRequest) -> tuple[Target, Proposal]:
    low, proposal = CASES[request.param]
    target = Target(226, low=low)  # with low = 0 some token is impossible after almost every prefix
    return target, proposal(target)


def trees(n: int) -> Iterator[tuple[Tokens, Tokens]]:
    """(tokens, parents) of every tree of n nodes over three tokens, siblings distinct."""
    for parents in itertools.product(*(range(-1, i) for i in range(n))):
        for tokens in itertools.product(range(3), repeat=n):
            if len(set(zip(parents, tokens, strict=True))) == n:
                yield tokens, parents


@pytest.mark.parametrize(("n", "low"), [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)])
def test_every_deterministic_tree(n: int, low: int) -> None:
    target = Target(n, low=low)
    for tokens, parents in trees(n):
        result = play(target, SampleMatching, deterministic(tokens, parents))  # type: ignore[arg-type]
        assert result.tv == 0, (tokens, parents, float(result.tv))
        draft = Draft(np.array(tokens, np.int32), np.array(parents, np.int32))
        reached = (target.probability(tuple(draft.tokens[list(path_to(draft, i))].tolist())) for i in range(n))
        assert result.accepted == sum(reached), "every drafted path is worth exactly its probability"


def best_possible(target: Target, q: Proposal, gamma: int, block: bool) -> Fraction:
    """E[tau] in closed form: sum over i and drafts of q(x_1..x_i) times the probability to keep all of x_1..x_i."""

    def below(prefix: Tokens, drawn: Fraction, kept: Fraction) -> Fraction:
        total = Fraction(0)
        for x in range(target.vocab_size):
            if len(prefix) < len(PROMPT) + gamma and q(prefix)[x] > 0:
                ratio = target.p(prefix)[x] / q(prefix)[x]
                keep = min(Fraction(1), kept * ratio) if block else kept * min(Fraction(1), ratio)
                mass = drawn * q(prefix)[x]
                total += mass * keep + below((*prefix, x), mass, keep)
        return total

    return below(PROMPT, Fraction(1), Fraction(1))


@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
def test_sampled_chains(case: tuple[Target, Proposal], gamma: int) -> None:
    target, q = case
    token, block = (play(target, rule, sampled(q, [1] * gamma)) for rule in RULES)
    assert (token.tv, block.tv) == (0, 0)
    assert token.accepted == best_possible(target, q, gamma, block=False)
    assert block.accepted == best_possible(target, q, gamma, block=True)
    assert block.accepted >= token.accepted
    if gamma == 1:
        assert block.distribution == token.distribution
    if q == target.p:
        assert token.accepted == block.accepted == gamma


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_chains_over_more_tables(rule: Rule, seed: int) -> None:
    target = Target(seed, low=seed % 2)
    assert play(target, rule, sampled(Table(seed + 90, low=seed // 2 % 2), [1, 1])).tv == 0


def test_block_verification_wins_where_the_paper_says() -> None:
    wins = 0
    for seed in range(10):
        target, drafting = Target(seed), sampled(Table(seed + 20), [1, 1])
        token, block = (play(target, rule, drafting).accepted for rule in RULES)
        assert block >= token
        wins += block > token
    assert wins >= 8


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_may_stop_early_depending_on_its_tokens(case: tuple[Target, Proposal], rule: Rule) -> None:
    target, q = case
    assert play(target, rule, sampled(q, [1, 1, 1], go_on=lambda prefix: prefix[-1] != 2)).tv == 0


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("k", [2, 3])
def test_siblings(case: tuple[Target, Proposal], k: int, replace: bool) -> None:
    target, q = case
    several = play(target, TokenRejection, sampled(q, [k], replace=replace))  # type: ignore[arg-type]
    assert several.tv == 0
    assert several.accepted >= play(target, TokenRejection, sampled(q, [1])).accepted  # type: ignore[arg-type]
    if k == 3 and not replace and all(q(PROMPT)):
        assert several.accepted == 1, "all tokens were drafted, so one of them must be accepted"


@pytest.mark.parametrize(("widths", "replace"), [((2, 1), True), ((2, 1), False), ((1, 2), True), ((1, 2), False)])
def test_siblings_on_two_levels(case: tuple[Target, Proposal], widths: tuple[int, ...], replace: bool) -> None:
    target, q = case
    assert play(target, TokenRejection, sampled(q, widths, replace=replace)).tv == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("vocab_size", "replace"), [(2, True), (3, False)])
def test_siblings_on_all_nodes_of_two_levels(vocab_size: int, replace: bool) -> None:
    target = Target(3, vocab_size)
    drafting = sampled(Table(60, vocab_size), [2, 2], replace=replace)
    assert play(target, TokenRejection, drafting).tv == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES)
def test_rejection_rules_match_samples_of_deterministic_drafts(rule: Rule) -> None:
    assert play(Target(2), rule, deterministic([0, 1, 0], [-1, -1, 0])).tv == 0


def test_a_draft_for_another_rule_is_refused() -> None:
    target = Target(1)
    chain = sampled(Table(2), [1])
    with pytest.raises(ValueError, match="TokenRejection"):
        play(target, SampleMatching, chain)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chains"):
        play(target, BlockVerification, sampled(Table(2), [2]))  # type: ignore[arg-type]
