"""Drawn drafts of the registry's drafters under the drawn rules, by both policies: chi-square against enumeration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.fixed import FixedLength
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Controller, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import SamplingParams
from edgespec.core.verify import BlockVerification, TokenRejection
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.candidates import RequestDraw
from edgespec.drafters.pard import PardSession
from edgespec.drafters.registry import SlotResources, drafter_specs
from edgespec.drafters.sequential import ModelDraftSession
from tests.contract.drafter_pair import make_cheap_stats
from tests.core.stats import assert_follows
from tests.core.toys import Remembering, RememberingSampler, open_session

V, RUNS = 4, 2500
PROMPT = [1, 0]
MODEL = Remembering(seed=3, vocab_size=V, order=3, sharpness=1.2)
DRAFT = Remembering(seed=4, vocab_size=V, order=2, sharpness=0.8)
SAMPLER = RememberingSampler(SamplingParams(temperature=0.9, presence_penalty=0.4, penalty_window=2), V)


def truth() -> list[float]:
    """[16] P(token 2, token 3): the two that a first round emits, bonus and correction tokens among them."""
    distribution = np.zeros((V, V))
    for tokens in product(range(V), repeat=3):
        p = 1.0
        for i, token in enumerate(tokens):
            prefix = [*PROMPT, *tokens[:i]]
            p *= SAMPLER.distribution(MODEL.logits(prefix), prefix).dense(V)[token]
        distribution[tokens[1:]] += p
    return distribution.ravel().tolist()


def open_drafter(name: str) -> Drafter:
    target = open_session("linear", MODEL)
    session = open_session("recurrent", DRAFT)
    return drafter_specs()[name].open(
        SlotResources(target, V, session, V - 1, head=ModelDraftSession(session, V))  # a head drafts as a model does
    )


# One drafter of each class: those of a class differ in their sessions alone, which are the toy's here.
DRAWING = {type(open_drafter(name)): name for name, spec in drafter_specs().items() if spec.draws}.values()


def make_controller(policy: str, drafter: Drafter, draw: RequestDraw) -> Controller:
    if policy == "fixed":
        return FixedLength([drafter], Budget(2, 2), V, draw)
    return Adaptive([drafter], make_cheap_stats(drafter.name), "test", V, takes_trees=lambda: True, draw=draw)


def check_distribution(drafter: Drafter, rule: type[TokenRejection] | type[BlockVerification], policy: str) -> None:
    session = open_session("tree", MODEL)
    draw = RequestDraw(SAMPLER, np.random.default_rng(17))
    counts = np.zeros((V, V), int)
    accepted = 0
    for seed in range(RUNS):
        controller = make_controller(policy, drafter, draw)
        rng = CounterRng(seed)
        verifier = rule(SAMPLER, rng)
        text: list[int] = []
        for event in speculate(session, controller, verifier, PROMPT, max_tokens=4, stop=frozenset()):
            if isinstance(event, Step):
                text += event.tokens
                accepted += event.n_accepted
            if len(text) >= 3:
                break
        assert not controller.failures
        counts[text[1], text[2]] += 1
    assert accepted > RUNS / 4, "the draft takes part"
    assert_follows(counts.ravel().tolist(), truth())


@pytest.mark.parametrize(
    ("rule", "policy"), [(TokenRejection, "fixed"), (BlockVerification, "fixed"), (BlockVerification, "adaptive")]
)
@pytest.mark.parametrize("name", DRAWING)
def test_toy_distribution_of_two_tokens(
    name: str, rule: type[TokenRejection] | type[BlockVerification], policy: str
) -> None:
    check_distribution(open_drafter(name), rule, policy)


class DropsUnlikelyTokens(BlockDrafter):
    """A drawn token is dropped because of its value."""

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        for _ in super().expand(tree, text, limit):
            votes = [each[self.name] for each in tree.votes]
            tree.truncate(next((i for i, q in enumerate(votes) if q < 0.25), len(votes)))
            yield


@pytest.mark.parametrize("rule", [TokenRejection, BlockVerification])
def test_a_dropped_token_is_noticed(rule: type[TokenRejection] | type[BlockVerification]) -> None:
    """On the toy too."""
    drafter = DropsUnlikelyTokens("pard", PardSession(open_session("linear", DRAFT), V, V - 1))
    with pytest.raises(AssertionError, match="chi-square"):
        check_distribution(drafter, rule, "fixed")
