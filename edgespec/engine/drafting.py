"""How to draft and verify: the options of a user, and the controller and verifier made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgespec.controller.adaptive import Autopilot
from edgespec.controller.fixed import FixedLength
from edgespec.controller.stats import DraftStats
from edgespec.core.arrays import Rng
from edgespec.core.protocols import Budget, Verifier
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
from edgespec.engine.session_pool import Slot
from edgespec.errors import InvalidRequest

DraftKind = Literal["none", "ngram", "model"]
Rule = Literal["auto", "sample", "rejection", "block"]

_SAMPLED_RULES = ("rejection", "block")
_MIN_SAMPLED_TEMPERATURE = 0.5  # below, greedy drafts are accepted as often


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to draft and verify. It may change between requests.

    draft_max   maximum draft depth: 0 is plain decoding, None leaves it to the autopilot
    draft_tree  maximum draft tokens in all: more than draft_max make a tree
    acceptance  'sample' for deterministic drafts, 'rejection' or 'block' for sampled ones. 'auto' is 'block' for chains
                of a draft model at temperature 0.5 and above without a seed, else 'sample'
    """

    kind: DraftKind
    draft_max: int | None = None
    draft_tree: int | None = None
    acceptance: Rule = "auto"

    def __post_init__(self) -> None:
        if not 0 <= (self.draft_max or 0) <= 63 or not 0 <= (self.draft_tree or 0) <= 63:
            raise InvalidRequest("--draft-max and --draft-tree must be 0 to 63.", hint="Start with --draft-max 3.")
        if self.draft_tree is not None and self.draft_max is None:
            raise InvalidRequest("--draft-tree needs --draft-max.", hint="Add --draft-max, or drop --draft-tree.")
        if self.acceptance in ("rejection", "block") and (self.is_tree or self.kind == "ngram"):
            raise InvalidRequest(
                f"the {self.acceptance} rule needs a sampled draft: chains only, by a draft model.",
                hint="Use --acceptance sample, which takes every draft.",
            )

    @property
    def is_adaptive(self) -> bool:
        """Whether the autopilot decides how much to draft."""
        return self.draft_max is None and not self.is_plain

    @property
    def is_plain(self) -> bool:
        return self.kind == "none" or self.draft_max == 0

    @property
    def is_tree(self) -> bool:
        return self.draft_tree is not None and self.draft_max is not None and self.draft_tree > self.draft_max

    def choose_rule(self, temperature: float, *, seeded: bool) -> Rule:
        """The rule for a request, with 'auto' resolved."""
        if temperature == 0 or self.kind != "model" or self.is_plain:
            return "sample"
        if self.acceptance != "auto":
            return self.acceptance
        return "block" if temperature >= _MIN_SAMPLED_TEMPERATURE and not seeded and not self.is_tree else "sample"


def make_verifier(rule: Rule, distribution: TargetDistribution, seed: int) -> Verifier:
    """The verifier of one generation. Deterministic drafts are always verified by sample matching."""
    rng = CounterRng(seed)
    matching = SampleMatching(distribution, rng)
    if rule == "sample":
        return matching
    return AutoVerifier(matching, (TokenRejection if rule == "rejection" else BlockVerification)(distribution, rng))


def make_fixed_controller(spec: Speculation, slot: Slot, sampler: Sampler, rule: Rule, seed: int) -> FixedLength:
    """The same amount of drafting each round, or none."""
    if spec.is_plain or spec.draft_max is None:
        return FixedLength(PlainDrafter(), Budget(0, 0))
    takes_tree = spec.is_tree and slot.target.capabilities.tree
    budget = Budget(spec.draft_max, spec.draft_tree if spec.draft_tree is not None and takes_tree else spec.draft_max)
    if slot.draft is None or spec.kind == "ngram":
        return FixedLength(NgramDrafter(), budget)
    choice = SampledChoice(sampler, _draft_rng(seed)) if rule in _SAMPLED_RULES else GreedyChoice()
    return FixedLength(ModelDrafter(slot.draft, sampler.vocab_size, choice), budget)


def make_autopilot(
    spec: Speculation, stats: DraftStats, slot: Slot, sampler: Sampler, rule: Rule, seed: int, sampling: str
) -> Autopilot:
    """Lookups, and the draft model for the kind 'model', chosen anew each round.

    `sampling` is the key under which acceptance is learned.
    """
    stepper = None
    if slot.draft is not None and spec.kind == "model":
        choice = Sampled(sampler, _draft_rng(seed)) if rule in _SAMPLED_RULES else GreedyTopK()
        stepper = DraftModelStepper(slot.draft, sampler.vocab_size, choice)
    session = slot.target
    return Autopilot(stats, sampling, stepper, trees=session.capabilities.tree, peers=lambda: session.peers)


def _draft_rng(seed: int) -> Rng:
    """Random numbers for the draft, independent of the verifier's."""
    return np.random.Generator(np.random.PCG64([seed & 0xFFFFFFFF, 2]))
