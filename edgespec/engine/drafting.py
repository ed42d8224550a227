"""How to draft and verify: what a user may ask for, and the parts of the loop that do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgespec.controller.adaptive import Autopilot
from edgespec.controller.fixed import FixedLength
from edgespec.controller.stats import DraftStats
from edgespec.core.arrays import Rng
from edgespec.core.protocols import Budget, Session, Verifier
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler
from edgespec.core.verify import AutoVerifier, BlockVerification, SampleMatching, TargetDistribution, TokenRejection
from edgespec.drafters.draft_model import (
    DraftModelStepper,
    GreedyChoice,
    GreedyTopK,
    ModelDrafter,
    Sampled,
    SampledChoice,
)
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.plain import PlainDrafter
from edgespec.errors import InvalidRequest

DraftKind = Literal["none", "ngram", "model"]
Rule = Literal["auto", "sample", "rejection", "block"]

_DRAWN = ("rejection", "block")
_DRAWS_FROM = 0.5  # temperature; below, a greedy draft is accepted as often


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to draft and verify; may change between requests.

    gamma   drafted tokens on a path at most; 0 is plain decoding, None leaves it to the autopilot
    nodes   drafted tokens in all; more than gamma make a tree
    rule    'sample' for deterministic drafts; 'rejection' and 'block' for drafts drawn at random; 'auto' is 'block'
            for a draft model's chains at temperatures from 0.5 on, where no seed asks for the same text again, else
            'sample'
    """

    kind: DraftKind
    gamma: int | None = None
    nodes: int | None = None
    rule: Rule = "auto"

    def __post_init__(self) -> None:
        if not 0 <= (self.gamma or 0) <= 63 or not 0 <= (self.nodes or 0) <= 63:
            raise InvalidRequest("gamma and tree nodes must be 0 to 63.", hint="Use --gamma 3 to begin with.")
        if self.nodes is not None and self.gamma is None:
            raise InvalidRequest("a number of nodes needs a gamma.", hint="Add --gamma, or drop --nodes.")
        if self.rule in ("rejection", "block") and (self.is_tree or self.kind == "ngram"):
            raise InvalidRequest(
                f"{self.rule} verification needs drafts drawn at random: chains only, by a draft model.",
                hint="Use --verify sample, which takes every draft.",
            )

    @property
    def is_plain(self) -> bool:
        return self.kind == "none" or self.gamma == 0

    @property
    def is_tree(self) -> bool:
        return self.nodes is not None and self.gamma is not None and self.nodes > self.gamma

    def rule_for(self, temperature: float, *, seeded: bool) -> Rule:
        """The rule for a request, 'auto' resolved."""
        if temperature == 0 or self.kind != "model" or self.is_plain:
            return "sample"
        if self.rule != "auto":
            return self.rule
        return "block" if temperature >= _DRAWS_FROM and not seeded and not self.is_tree else "sample"


def verifier_for(rule: Rule, distribution: TargetDistribution, seed: int) -> Verifier:
    random_source = CounterRng(seed)
    by_sample = SampleMatching(distribution, random_source)
    if rule == "sample":
        return by_sample
    return AutoVerifier(
        by_sample, (TokenRejection if rule == "rejection" else BlockVerification)(distribution, random_source)
    )


def fixed_for(
    spec: Speculation, draft: Session | None, sampler: Sampler, rule: Rule, seed: int, *, trees: bool
) -> FixedLength:
    """The same draft at every step, or none. `draft` is a session on the draft model, for the kind 'model'."""
    if spec.is_plain or spec.gamma is None:
        return FixedLength(PlainDrafter(), Budget(0, 0))
    budget = Budget(spec.gamma, spec.nodes if spec.nodes is not None and spec.is_tree and trees else spec.gamma)
    if draft is None or spec.kind == "ngram":
        return FixedLength(NgramDrafter(), budget)
    choice = SampledChoice(sampler, _drawing(seed)) if rule in _DRAWN else GreedyChoice()
    return FixedLength(ModelDrafter(draft, sampler.vocab_size, choice), budget)


def autopilot_for(
    spec: Speculation,
    draft_stats: DraftStats,
    draft: Session | None,
    sampler: Sampler,
    rule: Rule,
    seed: int,
    way: str,
    session: Session,
) -> Autopilot:
    """Lookups, and the draft model for the kind 'model', decided on each round. Acceptance is remembered by `way`;
    `session` is the target's.
    """
    stepper = None
    if draft is not None and spec.kind == "model":
        choice = Sampled(sampler, _drawing(seed)) if rule in _DRAWN else GreedyTopK()
        stepper = DraftModelStepper(draft, sampler.vocab_size, choice)
    return Autopilot(draft_stats, way, stepper, trees=session.capabilities.tree, peers=lambda: session.peers)


def _drawing(seed: int) -> Rng:
    """A stream of randomness apart from the verifier's."""
    return np.random.Generator(np.random.PCG64([seed & 0xFFFFFFFF, 2]))
