"""How to draft and verify: the options of a user, and the controller and verifier made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.fixed import FixedLength
from edgespec.autopilot.speculation import DRAWN_RULES, Rule, Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.core.drafter import Drafter, TokenDraw
from edgespec.core.protocols import Budget, Session, Verifier
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler
from edgespec.core.verify import BlockVerification, SampleMatching, TargetDistribution, TokenRejection
from edgespec.drafters.candidates import RequestDraw

_NEARLY_FREE = 1.1  # plain steps that a draft may take to be scored whole


def make_verifier(rule: Rule, distribution: TargetDistribution, seed: int) -> Verifier:
    """The verifier of one generation. Deterministic drafts are always verified by sample matching."""
    verifiers = {"rejection": TokenRejection, "block": BlockVerification}
    return verifiers.get(rule, SampleMatching)(distribution, CounterRng(seed))


def make_draw(rule: Rule, sampler: Sampler, seed: int, *, is_tree: bool) -> TokenDraw | None:
    """How draft tokens are drawn, independently of the verifier; None for rules that take deterministic drafts.

    `is_tree`: siblings are drawn too, if the rule takes them.
    """
    if rule not in DRAWN_RULES:
        return None
    rng = np.random.Generator(np.random.PCG64([seed & 0xFFFFFFFF, 2]))
    return RequestDraw(sampler, rng, takes_trees=is_tree and rule == "rejection")


def score_whole(spec: Speculation, target: Session, drafters: Sequence[Drafter], costs: CostModel) -> Speculation:
    """`spec`, with a fixed size instead of the autopilot if a single drafter has a `whole_size` that is nearly free."""
    size = drafters[0].whole_size if len(drafters) == 1 else None
    if size is None or spec.acceptance in DRAWN_RULES or not target.capabilities.tree:
        return spec
    is_nearly_free = costs.seconds(1 + size.nodes) <= _NEARLY_FREE * costs.seconds(1)
    return replace(spec, draft_max=size.depth, draft_tree=size.nodes) if is_nearly_free else spec


def make_fixed_controller(
    spec: Speculation, target: Session, drafters: Sequence[Drafter], draw: TokenDraw | None
) -> FixedLength:
    """The same amount of drafting each round, or none."""
    vocab_size = target.capabilities.vocab_size
    if spec.is_plain or spec.draft_max is None:
        return FixedLength((), Budget(0, 0), vocab_size)
    nodes = spec.draft_max if spec.draft_tree is None else spec.draft_tree
    budget = Budget(spec.draft_max, nodes if spec.is_tree else min(nodes, spec.draft_max))
    return FixedLength(drafters, budget, vocab_size, draw, lambda: target.capabilities.tree)


def make_adaptive_controller(
    stats: DraftStats, target: Session, drafters: Sequence[Drafter], draw: TokenDraw | None, sampling: str
) -> Adaptive:
    """The autopilot; `sampling` is the key under which acceptance is learned."""
    return Adaptive(
        drafters,
        stats,
        sampling,
        target.capabilities.vocab_size,
        takes_trees=lambda: target.capabilities.tree,
        draw=draw,
        peers=lambda: target.peers,
    )
