"""A drafter of an engine, with what was loaded for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedDraft, AttachedHead
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Session
from edgespec.drafters.registry import DrafterSpec, SlotMemory, SlotResources
from edgespec.models.drafts import DrafterPlan, describe_variant
from edgespec.models.hub import Hub
from edgespec.models.resolve import fetch_source


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter of an engine, with what was loaded for it: `source` is None if it needs nothing."""

    plan: DrafterPlan
    source: Model | AttachedDraft | AttachedHead | None = None

    @property
    def spec(self) -> DrafterSpec:
        return self.plan.spec

    @property
    def label(self) -> str:
        """What the user calls it: a model's name, a self-draft's layers."""
        return self.plan.label

    def open(self, target: Session, vocab_size: int, memory: SlotMemory) -> Drafter:
        """The drafter of one slot, whose target session is `target`. Raises EdgespecError, ValueError."""
        made: dict[str, Any] = {}  # what the source opens for this slot
        if isinstance(self.source, AttachedHead):
            target.rewind(0)  # it needs the hidden states of the whole text
            made["head"] = self.source.open_session(target)
        elif isinstance(self.source, AttachedDraft):
            made["session"] = self.source.open_session(target)
        elif self.source is not None:
            made["session"] = self.source.open_session()
        try:
            return self.spec.open(
                SlotResources(target, vocab_size, mask_token=self.plan.mask_token, memory=memory, **made)
            )
        except BaseException:
            for each in made.values():
                each.close()
            raise

    def close(self) -> None:
        """Free what was loaded, after the drafters of all slots."""
        if self.source is not None:
            self.source.close()


def identify_drafters(drafters: Iterable[LoadedDrafter], hub: Hub) -> tuple[list[Path], str]:
    """(the files of their models, what else their costs and acceptance depend on), for the key of a ProfileStore."""
    plans = [each.plan for each in drafters]
    return [fetch_source(each.model.source, hub) for each in plans if each.model is not None], describe_variant(plans)
