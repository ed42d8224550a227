"""Drafts that were adapted to their user, instead of those that they were made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.models.drafts import Adaptation, DrafterPlan, PlannedModel
from edgespec.models.heads import read_draft
from edgespec.models.hub import Hub
from edgespec.models.resolve import LocalModel, find_local
from edgespec.models.versions import AdaptedDrafts, AdaptedPair, Card
from edgespec.progress import notice


def use_adapted(drafters: Iterable[DrafterPlan], target: PlannedModel, folder: Path, hub: Hub) -> list[DrafterPlan]:
    """`drafters`, each with the version of its model that is in use. Versions lie in `folder`; the user is told of
    those that cannot be used.

    A model that is not downloaded has no versions. Raises CacheError for models that cannot be read.
    """
    found = []
    target_path = find_local(target.source, hub)
    for each in drafters:
        path = find_local(each.model.source, hub) if each.model is not None else None
        known = watch(each, target_path, path, folder)
        try:
            found.append(_use_version(known, hub))
        except EdgespecError as refusal:
            notice(f"Drafting with {each.label} itself: {refusal.message}")
            found.append(known)
    return found


def watch(drafter: DrafterPlan, target: Path | None, draft: Path | None, folder: Path | None) -> DrafterPlan:
    """`drafter`, whose model is at `draft`, with its versions in `folder` for the target at `target`.

    The same if a path is None, or the model is in the target's file, or it is watched already. Raises CacheError for
    models that cannot be read.
    """
    if target is None or draft is None or folder is None or drafter.is_in_target or drafter.adaptation is not None:
        return drafter
    pair = AdaptedDrafts(folder).pair(target, draft)
    return replace(drafter, adaptation=Adaptation(pair, read_active(pair)))


def is_outdated(drafter: DrafterPlan) -> bool:
    """Tells whether another version is in use since the drafter was last looked at."""
    known = drafter.adaptation
    return known is not None and read_active(known.pair) != known.active


def mark_seen(drafter: DrafterPlan) -> DrafterPlan:
    """`drafter` as it is, which is not outdated until another version is in use than now."""
    known = drafter.adaptation
    return replace(drafter, adaptation=replace(known, active=read_active(known.pair))) if known else drafter


def _use_version(drafter: DrafterPlan, hub: Hub) -> DrafterPlan:
    """`drafter` with the version of its model that is in use. Raises InvalidModelFile for a damaged or missing one."""
    known = drafter.adaptation
    version = known.pair.active() if known is not None else None
    if known is None or version is None or drafter.model is None:
        return drafter
    card, source = version.card, LocalModel(version.path, "mlx" if version.path.is_dir() else "gguf")
    facts, head = read_draft(source, hub, is_head=drafter.head is not None)
    model = replace(drafter.model, source=source, metadata=facts)
    return replace(drafter, model=model, head=head, adaptation=Adaptation(known.pair, card.version, card))


def describe_version(card: Card) -> str:
    return f"Drafting with version {card.version} of the draft, adapted on {card.date}."


def read_active(pair: AdaptedPair) -> int | None:
    """The number of the version in use; None if that is not known."""
    try:
        return pair.active_number()
    except EdgespecError:
        return None
