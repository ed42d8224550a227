"""The drafters of a target before anything is loaded for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgespec.backends.attached_draft import SelfDraftSpec
from edgespec.drafters.registry import DrafterSpec
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.heads import HeadSpec
from edgespec.models.references import Reference
from edgespec.models.resolve import Source
from edgespec.models.versions import BASE, NO_BASE, AdaptedPair, Card


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A drafter before anything is loaded for it.

    reference   of the model that the user has named
    self_draft  how the target drafts for itself
    model       its draft model or trained head; for a head in the target's own file the target
    mask_token  of a PARD model
    head        what the file of `model` says, if that is a trained head
    found       of a head that 'auto' has found: a sentence for the user once it is loaded, or shown in a plan
    adaptation  the versions of `model` that were adapted to the user; None if it lies in the target or is not here
    """

    spec: DrafterSpec
    reference: str | None = None
    self_draft: SelfDraftSpec | None = None
    model: PlannedModel | None = None
    mask_token: int | None = None
    head: HeadSpec | None = None
    found: str = ""
    adaptation: Adaptation | None = None

    @property
    def label(self) -> str:
        """What the user calls it."""
        named: object = self.reference if self.model is None else self.model.reference
        if self.is_in_target:
            named = None
        version = f" (version {self.card.version})" if self.card is not None else ""
        if self.card is not None and self.card.base == NO_BASE:  # its file has no name that the user knows
            named = f"{self.spec.name} head"
        return f"{named or self.self_draft or self.spec.name}{version}"

    @property
    def card(self) -> Card | None:
        """Describes the adapted version that is used; None for the draft itself."""
        return self.adaptation.card if self.adaptation is not None else None

    @property
    def is_in_target(self) -> bool:
        """Tells whether it is a head in the target's own file."""
        return self.head is not None and self.head.in_target


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A target, draft model or trained head before it is loaded."""

    reference: Reference
    source: Source
    metadata: ModelMetadata


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The versions of a draft that were adapted to the user.

    active  the number of the version that was to be used when it was last looked at; None if that was not known
    card    of the version that is used; None for the draft itself
    """

    pair: AdaptedPair
    active: int | None = BASE
    card: Card | None = None


def describe_variant(drafters: Iterable[DrafterPlan]) -> str:
    """What the costs and the acceptance of drafters depend on, apart from their files."""
    plans = list(drafters)
    variants = [str(each.self_draft) for each in plans if each.self_draft is not None]
    return "+".join(variants + [f"version {each.card.version}" for each in plans if each.card is not None])
