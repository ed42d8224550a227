"""The proofs of exactness must fail for plausible bugs: each of these rules, draws and coins is measurably biased."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.core.verify import BlockVerification, SampleMatching, TokenRejection
from tests.core.enumerate import PROMPT, Drafting, Enumerated, Rule, Table, Target, deterministic, play, sampled
from tests.core.mutants import (
    AcceptsByTheProductAlone,
    BlockRule,
    BreaksAtFirstRejection,
    CorrectsFromP,
    DescendsToCousins,
    DrawsAgainOnMismatch,
    DrawsBonusFromQ,
    ForgetsAcceptedTokens,
    ForgetsToClip,
    InvertsTheRatio,
    JudgesSiblingsIndependently,
    LeavesResidualUnnormalised,
    NeverKeepsTheWholeBlock,
    OneUniform,
    OwesWithoutTheProduct,
    ReadsTheParentsRow,
    StopsOneShort,
    TargetRule,
    TokenRule,
    UsesAnothersQ,
)

Q = Table(11)
TREE = deterministic([0, 1, 1, 2], [-1, -1, 0, 1])
CHAIN = sampled(Q, [1, 1])
LONG_CHAIN = sampled(Q, [1, 1, 1])
SIBLINGS = sampled(Q, [2])
BRANCHES = sampled(Q, [2, 1])


@dataclass(frozen=True)
class Setting:
    rule: Rule
    drafting: Drafting
    random_source: type[Enumerated] = Enumerated


def without_replacement_but_unconditional(random_source: Enumerated) -> Draft:
    draft = sampled(Q, [2], replace=False)(random_source)
    return Draft(draft.tokens, draft.parents, np.stack([Q(PROMPT)] * 2))


def most_probable_with_its_q(random_source: Enumerated) -> Draft:
    row = Q(PROMPT)
    return Draft.chain([int(row.argmax())], row[None])


def drops_what_looks_unlikely(random_source: Enumerated) -> Draft:
    row = Q(PROMPT)
    x = random_source.choose(row, 0)
    return Draft.chain([x], row[None]) if row[x] > row.min() else NO_DRAFT


SOUND = {
    "target": Setting(TargetRule, TREE),
    "token, chain": Setting(TokenRule, LONG_CHAIN),
    "token, siblings": Setting(TokenRule, BRANCHES),
    "block": Setting(BlockRule, LONG_CHAIN),
}
BIASED = {
    "target: a second draw after a mismatch": Setting(DrawsAgainOnMismatch, TREE),
    "target: row of the node before": Setting(ReadsTheParentsRow, TREE),
    "target: context without accepted tokens": Setting(ForgetsAcceptedTokens, TREE),
    "target: any node with the token will do": Setting(DescendsToCousins, TREE),
    "token: accept with q/p": Setting(InvertsTheRatio, CHAIN),
    "token: residual not normalised before the next sibling": Setting(LeavesResidualUnnormalised, SIBLINGS),
    "token: every sibling tested against p": Setting(JudgesSiblingsIndependently, SIBLINGS),
    "token: residual of another node's q": Setting(UsesAnothersQ, CHAIN),
    "token: correction from p": Setting(CorrectsFromP, CHAIN),
    "token: bonus from q": Setting(DrawsBonusFromQ, CHAIN),
    "block: break at the first rejection": Setting(BreaksAtFirstRejection, CHAIN),
    "block: the last coin is never thrown": Setting(NeverKeepsTheWholeBlock, CHAIN),
    "block: tau one too small": Setting(StopsOneShort, CHAIN),
    "block: h_i = P_i": Setting(AcceptsByTheProductAlone, CHAIN),
    "block: residual without P_tau": Setting(OwesWithoutTheProduct, LONG_CHAIN),
    "block: products not clipped at one": Setting(ForgetsToClip, LONG_CHAIN),
    "draft: without replacement, i.i.d. q": Setting(TokenRejection, without_replacement_but_unconditional),  # type: ignore[arg-type]
    "draft: the best token verified with p/q": Setting(TokenRejection, most_probable_with_its_q),  # type: ignore[arg-type]
    "draft: a drawn token is dropped": Setting(TokenRejection, drops_what_looks_unlikely),  # type: ignore[arg-type]
    "draft: a drawn token is dropped (block)": Setting(BlockVerification, drops_what_looks_unlikely),  # type: ignore[arg-type]
    "chance: one number for all decisions (target)": Setting(SampleMatching, TREE, OneUniform),  # type: ignore[arg-type]
    "chance: one number for all decisions (token)": Setting(TokenRejection, CHAIN, OneUniform),  # type: ignore[arg-type]
    "chance: one number for all decisions (block)": Setting(BlockVerification, CHAIN, OneUniform),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("setting", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("low", [0, 1])
def test_the_rules_restated_without_a_bug_are_exact(setting: Setting, low: int) -> None:
    assert play(Target(44, low=low), setting.rule, setting.drafting).tv == 0


@pytest.mark.parametrize("name", BIASED)
def test_a_bug_shows(name: str) -> None:
    setting = BIASED[name]
    tv = play(Target(44), setting.rule, setting.drafting, setting.random_source).tv
    assert tv > 0.001, f"{name}: TV {float(tv):.5f} is too small to notice"


@pytest.mark.parametrize("rule", [SampleMatching, TokenRejection, BlockVerification])
def test_dropping_before_the_draw_is_no_bug(rule: Rule) -> None:
    drafting = sampled(Q, [1], go_on=lambda prefix: False)
    assert play(Target(44), rule, drafting).tv == 0
