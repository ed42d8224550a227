"""Drafts that were adapted to their user, in place of those that they were made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from edgespec.backends import FileBackend
from edgespec.errors import DraftRefused, EdgespecError, InvalidModelFile
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.hub.cache import HubFile, HubQuant, HubRepo
from edgespec.hub.hub import Hub
from edgespec.planner.draft_finder import Adaptation, PlannedDrafter, PlannedModel
from edgespec.planner.heads import read_draft
from edgespec.registry.adapted import BASE, AdaptedDrafts, Card
from edgespec.registry.resolve import LocalModel, ResolvedPair, find_local, resolve_source
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch


def use_adapted(
    drafters: Iterable[PlannedDrafter], target: PlannedModel, folder: Path, hub: Hub, notice: Callable[[str], None]
) -> list[PlannedDrafter]:
    """`drafters` with the versions in use of their models, which lie in `folder`; `notice` hears of unusable ones.

    A model that is not downloaded has no versions. Raises CacheError for models that cannot be read.
    """
    found = []
    target_path = find_local(target.source, hub)
    for each in drafters:
        path = find_local(each.model.source, hub) if each.model is not None else None
        known = watch(each, target_path, path, folder) if target_path is not None else each
        try:
            found.append(choose_version(known, target.metadata, hub))
        except EdgespecError as refusal:
            notice(f"Drafting with {each.label} itself: {refusal.message}")
            found.append(mark_seen(known))
    return found


def watch(drafter: PlannedDrafter, target: Path, draft: Path | None, folder: Path | None) -> PlannedDrafter:
    """`drafter`, whose model is at `draft`, with its versions in `folder` for the target at `target`.

    The same where it has no model, or one in the target's file, or is watched already. Raises CacheError for models
    that cannot be read.
    """
    if draft is None or folder is None or drafter.is_in_target or drafter.adaptation is not None:
        return drafter
    return replace(drafter, adaptation=Adaptation(drafter, AdaptedDrafts(folder).pair(target, draft)))


def is_outdated(drafter: PlannedDrafter) -> bool:
    """Tells whether another version is in use since the drafter was last looked at."""
    return drafter.adaptation is not None and _read_active(drafter.adaptation) != drafter.adaptation.active


def mark_seen(drafter: PlannedDrafter) -> PlannedDrafter:
    """`drafter` as it is, which is not outdated until another version is in use than now."""
    known = drafter.adaptation
    return drafter if known is None else replace(drafter, adaptation=replace(known, active=_read_active(known)))


def use_base(drafter: PlannedDrafter) -> PlannedDrafter:
    """`drafter` with the draft itself, until another version is in use than it was last looked at."""
    known = drafter.adaptation
    return drafter if known is None else replace(known.base, adaptation=replace(known, card=None))


def choose_version(drafter: PlannedDrafter, target: ModelMetadata, hub: Hub) -> PlannedDrafter:
    """`drafter` with the version of its model that is in use now.

    Raises InvalidModelFile for one that is damaged or missing, DraftRefused for one of another kind or vocabulary.
    """
    known = drafter.adaptation
    if known is None or known.base.model is None:
        return drafter
    number = known.pair.active_number()
    if number == BASE:
        return replace(known.base, adaptation=replace(known, active=BASE, card=None))
    version = known.pair.read(number)
    source = LocalModel(version.path, "mlx" if version.path.is_dir() else "gguf")
    facts, head = read_draft(source, hub, is_head=drafter.head is not None)
    if (head and head.kind) != (drafter.head and drafter.head.kind):
        raise DraftRefused(f"version {number} of the draft is another kind of draft.", hint="Use another version.")
    has_vocabulary = head is None or isinstance(facts, Header)
    if has_vocabulary and (reason := find_tokenizer_mismatch(target, facts)):
        raise DraftRefused(f"version {number} of the draft has another vocabulary: {reason}.", hint="Use another one.")
    model = PlannedModel(known.base.model.reference, source, facts)
    return replace(drafter, model=model, head=head, adaptation=replace(known, active=number, card=version.card))


def describe_version(card: Card) -> str:
    """One sentence for the user."""
    return f"Drafting with version {card.version} of the draft, adapted on {card.date}."


def find_version(pair: ResolvedPair, backend: FileBackend, folder: Path, hub: Hub) -> str | None:
    """The version in use of the draft model of a pair in words, or why it cannot be used; None for none.

    Raises CacheError for models that cannot be read, and what `resolve_source` raises.
    """
    reference = pair.models.draft
    is_remote = isinstance(reference, HubRepo | HubQuant | HubFile) and hub.find_cached(reference) is None
    if reference is None or is_remote:
        return None
    target, path = find_local(pair.target, hub), find_local(resolve_source(reference, backend, hub), hub)
    if target is None or path is None:
        return None
    try:
        version = AdaptedDrafts(folder).pair(target, path).active()
    except InvalidModelFile as refusal:
        return refusal.message.removesuffix(".")
    return f"version {version.card.version} of {version.card.date}" if version is not None else None


def _read_active(known: Adaptation) -> int | None:
    """The number of the version in use; None where that is not known."""
    try:
        return known.pair.active_number()
    except EdgespecError:
        return None
