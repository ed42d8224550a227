"""How to draft and verify, as a user states it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.drafters.registry import drafter_specs
from edgespec.errors import InvalidRequest

Rule = Literal["auto", "sample", "rejection", "block"]
MAX_DRAFT = 63
"""Draft tokens of a round, at most."""
DRAWN_RULES = ("rejection", "block")
_MIN_DRAWN_TEMPERATURE = 0.5  # below, greedy drafts are accepted as often


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to draft and verify. It may change between requests. Raises InvalidRequest for options that do not combine.

    drafters    names of the registry; none is plain decoding
    draft_max   maximum draft depth: 0 is plain decoding, None leaves it to the autopilot
    draft_tree  maximum draft tokens in all: more than draft_max make a tree
    acceptance  'sample' for deterministic drafts, 'rejection' or 'block' for drawn ones. 'auto' is 'block' for chains
                of drafters that can draw at temperature 0.5 and above without a seed, else 'sample'
    """

    drafters: tuple[str, ...] = ()
    draft_max: int | None = None
    draft_tree: int | None = None
    acceptance: Rule = "auto"

    def __post_init__(self) -> None:
        if not 0 <= (self.draft_max or 0) <= MAX_DRAFT or not 0 <= (self.draft_tree or 0) <= MAX_DRAFT:
            message = f"a draft has 0 to {MAX_DRAFT} tokens."
            raise InvalidRequest(message, hint="Start with 3.")
        if self.draft_tree is not None and self.draft_max is None:
            raise InvalidRequest("--draft-tree needs --draft-max.", hint="Add --draft-max, or drop --draft-tree.")
        if self.acceptance in DRAWN_RULES and self.drafters and not self._draws:
            raise InvalidRequest(
                f"the {self.acceptance} rule needs a drawn draft, by a draft model or a head.",
                hint="Use --acceptance sample, which takes every draft.",
            )
        if self.acceptance == "block" and self.is_tree:
            raise InvalidRequest(
                "the block rule takes chains only.", hint="Use --acceptance rejection, which takes drawn trees."
            )

    @property
    def is_adaptive(self) -> bool:
        """Whether the autopilot decides how much to draft."""
        return self.draft_max is None and not self.is_plain

    @property
    def is_plain(self) -> bool:
        return not self.drafters or self.draft_max == 0

    @property
    def is_tree(self) -> bool:
        return self.draft_tree is not None and self.draft_max is not None and self.draft_tree > self.draft_max

    def choose_rule(self, temperature: float, *, seeded: bool) -> Rule:
        """The rule for a request, with 'auto' resolved."""
        if temperature == 0 or not self._draws or self.is_plain:
            return "sample"
        if self.acceptance != "auto":
            return self.acceptance
        return "block" if temperature >= _MIN_DRAWN_TEMPERATURE and not seeded and not self.is_tree else "sample"

    @property
    def _draws(self) -> bool:
        specs = drafter_specs()
        return any(specs[name].draws for name in self.drafters if name in specs)
