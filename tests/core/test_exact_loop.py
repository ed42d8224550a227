"""Proof by enumeration of the whole loop: drafting, verifying and clipping keep the distribution.

The controllers are the shipped ones, driven by drafters whose random draws are enumerated too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import cycle, product

import numpy as np
import pytest

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.draft_size import DraftSize
from edgespec.autopilot.fixed import FixedLength
from edgespec.autopilot.round import DraftRound
from edgespec.autopilot.steered import SteeredController
from edgespec.backends.toy_session import ToySession
from edgespec.core.draft_tree import DraftTree
from edgespec.core.loop import speculate
from edgespec.core.protocols import NO_DRAFT, Budget, Controller, Draft, Round, Step
from edgespec.core.verify import BlockVerification, SampleMatching, TokenRejection
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from tests.core.enumerate import PROMPT, Enumerated, Rule, Table, Target, Tokens, deterministic, outcomes, sampled
from tests.core.enumerated_drafters import Drawn, EnumeratedDraw, Fixed, TwoRows, make_adaptive, model_drafter
from tests.core.toys import Maker

Controlling = Callable[[Enumerated], Controller]
BOTH_RULES: list[Rule] = [TokenRejection, BlockVerification]  # type: ignore[list-item]


def truth(target: Target, stop: frozenset[int], length: int) -> dict[Tokens, Fraction]:
    """The distribution of plain decoding: all texts that end with a stop token or have `length` tokens."""
    distribution: dict[Tokens, Fraction] = {}
    for n in range(1, length + 1):
        for tokens in product(range(target.vocab_size), repeat=n):
            if not stop & set(tokens[:-1]) and (n == length or tokens[-1] in stop) and target.probability(tokens):
                distribution[tokens] = target.probability(tokens)
    return distribution


def generated(
    target: Target, rule: Rule, control: Controlling, stop: frozenset[int], length: int
) -> dict[Tokens, Fraction]:
    """The distribution of whole texts."""

    def run(random_source: Enumerated) -> Tokens:
        steps = speculate(
            ToySession(target),  # type: ignore[arg-type]
            control(random_source),
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


@pytest.mark.parametrize("eager", [True, False], ids=["beyond the limit", "fixed length"])
@pytest.mark.parametrize("stop", [frozenset[int](), frozenset({1})])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize(
    ("tokens", "parents"), [((0, 1, 2), (-1, 0, 1)), ((2, 0, 1, 0), (-1, -1, 0, 1)), ((1, 1, 1), (-1, 0, 1))]
)
def test_deterministic_trees(tokens: Tokens, parents: Tokens, length: int, stop: frozenset[int], eager: bool) -> None:
    target, draft = Target(3, low=0), deterministic(tokens, parents)(Enumerated())

    def control(random_source: Enumerated) -> Controller:
        return Maker(lambda text, limit: draft) if eager else FixedLength([Fixed(draft)], Budget(9, 10), 3)

    assert generated(target, SampleMatching, control, stop, length) == truth(target, stop, length)  # type: ignore[arg-type]


@pytest.mark.parametrize(("vocab_size", "length"), [(2, 4), (3, 3)])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("stop", [frozenset[int](), frozenset({1})])
@pytest.mark.parametrize(
    ("rule", "widths"), [(TokenRejection, (1, 1)), (BlockVerification, (1, 1)), (TokenRejection, (2, 1))]
)
def test_sampled_drafts(
    rule: Rule, widths: tuple[int, ...], stop: frozenset[int], eager: bool, vocab_size: int, length: int
) -> None:
    """`eager` drafts ignore how many tokens are left to generate."""
    target, q = Target(4, vocab_size, low=vocab_size == 2), Table(9, vocab_size)

    def control(random_source: Enumerated) -> Controller:
        def make(text: Sequence[int], limit: Budget) -> Draft:
            drawn = widths if eager and limit.depth else widths[: limit.depth]
            return sampled(lambda prefix: q((*text, *prefix[len(PROMPT) :])), drawn)(random_source)

        return Maker(make)

    assert generated(target, rule, control, stop, length) == truth(target, stop, length)


@pytest.mark.parametrize("rule", BOTH_RULES)
@pytest.mark.parametrize("stop", [frozenset[int](), frozenset({1})])
@pytest.mark.parametrize(("vocab_size", "length"), [(2, 4), (3, 3)])
def test_drafts_whose_length_depends_on_their_tokens(
    rule: Rule, stop: frozenset[int], vocab_size: int, length: int
) -> None:
    """A drafter that draws until the token 0."""
    target = Target(5, vocab_size, low=vocab_size == 2)

    def control(random_source: Enumerated) -> Controller:
        drafter = Drawn(Table(8, vocab_size), random_source, lambda drawn: drawn[-1] == 0)
        return FixedLength([drafter], Budget(9, 9), vocab_size)

    assert generated(target, rule, control, stop, length) == truth(target, stop, length)


@pytest.mark.parametrize("rule", BOTH_RULES)
@pytest.mark.parametrize(("vocab_size", "length"), [(2, 4), (3, 3)])
@pytest.mark.parametrize("kind", ["sequential", "block"])
@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_drawn_drafts_of_the_shipped_drafters(policy: str, kind: str, rule: Rule, vocab_size: int, length: int) -> None:
    """The adaptive length of a sequential draft depends on the probabilities of the tokens drawn before."""
    target, model = Target(4, vocab_size, low=vocab_size == 2), Target(8, vocab_size)
    seen = dict[tuple[int, ...], set[int]]()  # text -> lengths of its drafts

    def control(random_source: Enumerated) -> Controller:
        drafter = model_drafter(model) if kind == "sequential" else BlockDrafter("block", TwoRows(model))
        draw = EnumeratedDraw(model, random_source)
        controller: Controller = (
            FixedLength([drafter], Budget(2, 2), vocab_size, draw)
            if policy == "fixed"
            else make_adaptive([drafter], vocab_size, draw)
        )
        propose = controller.propose

        def heard(tokens: Sequence[int], limit: Budget) -> Draft:
            draft = propose(tokens, limit)
            seen.setdefault(tuple(tokens), set()).add(len(draft))
            assert (draft.q is None) == (len(draft) == 0)
            return draft

        controller.propose = heard  # type: ignore[method-assign]
        return controller

    assert generated(target, rule, control, frozenset(), length) == truth(target, frozenset(), length)
    varies = policy == "adaptive" and kind == "sequential" and length == 4
    assert any(lengths == {1, 2} for lengths in seen.values()) == varies
    assert {1} in seen.values(), "before the last token"


class CutsSiblings(FixedLength):
    """A mistake: of drawn siblings those that are improbable are not verified."""

    def _decide(self, draft: Draft, source: str = "") -> Draft:
        if draft.q is not None:
            kept: list[int] = []
            for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
                if (parent < 0 or parent in kept) and draft.q[node][token] * 2 >= 1:
                    kept.append(node)
            place = {node: i for i, node in enumerate(kept)} | {-1: -1}
            parents = np.array([place[int(draft.parents[node])] for node in kept], np.int32)
            draft = Draft(draft.tokens[kept], parents, draft.q[kept]) if kept else NO_DRAFT
        return super()._decide(draft, source)


@pytest.mark.parametrize("kind", [FixedLength, CutsSiblings])
@pytest.mark.parametrize(("vocab_size", "length", "budget"), [(2, 4, Budget(2, 4)), (3, 3, Budget(2, 5))])
def test_drawn_trees_of_the_shipped_drafter(
    kind: type[FixedLength], vocab_size: int, length: int, budget: Budget
) -> None:
    """Siblings are drawn without replacement; how many there are below a node depends on what was drawn before."""
    target, model, shapes = Target(4, vocab_size, low=vocab_size == 2), Target(8, vocab_size), set[bool]()

    def control(random_source: Enumerated) -> Controller:
        draw = EnumeratedDraw(model, random_source, takes_trees=True)
        controller = kind([model_drafter(model)], budget, vocab_size, draw)
        propose = controller.propose

        def heard(tokens: Sequence[int], limit: Budget) -> Draft:
            draft = propose(tokens, limit)
            shapes.add(draft.is_chain)
            return draft

        controller.propose = heard  # type: ignore[method-assign]
        return controller

    is_exact = generated(target, TokenRejection, control, frozenset(), length) == truth(target, frozenset(), length)
    assert is_exact == (kind is FixedLength)
    assert kind is CutsSiblings or False in shapes, "trees"


class DropsTheImprobable(Adaptive):
    """A mistake: a drawn token that is not worth verifying is not verified."""

    def _decide(self, round_: DraftRound, reason: str, draft: Draft, size: DraftSize) -> Draft:
        if draft.q is not None and round_.call is not None:
            n = next((i for i, p in enumerate(round_.call.tree.probabilities) if p < 0.3), len(draft))
            draft = Draft(draft.tokens[:n], draft.parents[:n], draft.q[:n], draft.drafters[:n])
        return super()._decide(round_, reason, draft, size)


@pytest.mark.parametrize("kind", [Adaptive, DropsTheImprobable])
@pytest.mark.parametrize("rule", [TokenRejection, BlockVerification])
def test_to_drop_a_drawn_token_would_show(rule: Rule, kind: type[Adaptive]) -> None:
    target, model = Target(4, 2), Target(8, 2)

    def control(random_source: Enumerated) -> Controller:
        return make_adaptive([model_drafter(model)], 2, EnumeratedDraw(model, random_source), kind)

    is_exact = generated(target, rule, control, frozenset(), 4) == truth(target, frozenset(), 4)
    assert is_exact == (kind is Adaptive)


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_deterministic_and_drawn_rounds(policy: str) -> None:
    """A drawn drafter and lookups, each draft by its own rule; the drawn one drafts at every second position only."""
    target, model, kinds = Target(6, 2, low=True), Target(3, 2), set()

    class InTurn(SequentialDrafter):
        def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
            if len(text) % 2:
                yield from super().expand(tree, text, limit)

    def control(random_source: Enumerated) -> Controller:
        session = ModelDraftSession(ToySession(model), 2)  # type: ignore[arg-type]
        drafters, draw = [InTurn("model", session), Fixed(Draft.chain([0, 1]))], EnumeratedDraw(model, random_source)
        if policy == "adaptive":
            drafters[1].is_free = True
        controller = (
            FixedLength(drafters, Budget(2, 2), 2, draw) if policy == "fixed" else make_adaptive(drafters, 2, draw)
        )
        observe = controller.observe

        def heard(done: Round) -> None:
            kinds.add((len(done.draft) > 0, done.draft.q is not None))
            observe(done)

        controller.observe = heard  # type: ignore[method-assign]
        return controller

    assert generated(target, BlockVerification, control, frozenset(), 4) == truth(target, frozenset(), 4)
    assert kinds >= {(True, True), (True, False)}


@pytest.mark.parametrize("pauses", [(True,), (False, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("rule", BOTH_RULES)
def test_drafting_switched_off_and_on(rule: Rule, pauses: tuple[bool, ...]) -> None:
    """`pauses` says, as often as it is asked, whether drafting is switched off."""
    target = Target(7, 2, low=True)

    def control(random_source: Enumerated) -> Controller:
        asked = cycle(pauses)
        drafter = Drawn(Table(5, 2), random_source)
        return SteeredController(FixedLength([drafter], Budget(2, 2), 2), lambda: next(asked))

    assert generated(target, rule, control, frozenset(), 4) == truth(target, frozenset(), 4)
