"""Chooses how a target drafts for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgespec.autopilot.store import Setting, current_setting
from edgespec.backends import Model
from edgespec.backends.attached_draft import SelfDraftSpec
from edgespec.drafters.registry import SELF, drafter_specs
from edgespec.engine.loaded_model import LoadedModel
from edgespec.engine.runtime_settings import apply_settings
from edgespec.engine.selfdraft_cache import SelfDraftCache
from edgespec.engine.selfdraft_search import EVALUATION_S, SelfDraftSearch, quick_methods
from edgespec.machines.ranks import count_ranks
from edgespec.models.draft_words import AUTO
from edgespec.models.drafts import DrafterPlan
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan
from edgespec.progress import notice


def choose_self_draft(
    config: LoadConfig, planned: Plan, target: Model, target_path: Path, key: Setting
) -> SelfDraftSpec | None:
    """The self-draft to use; None for none.

    The layers of a requested one are searched and remembered under `key`; 'auto' takes what `search_when_idle` has
    remembered. Raises Unsupported for a requested method that the model has not, BackendError, CacheError, Cancelled.
    """
    requested = planned.self_draft
    if requested is not None and requested.kept != ():
        return requested
    cache = SelfDraftCache(target_path, planned.name)
    if requested is None:
        choice = cache.look_up(key, AUTO) if _is_open(config) else None
        return choice.method if choice is not None and choice.pays else None
    choice = cache.look_up(key, str(requested))
    if choice is None:
        notice(f"Searching the layers of {requested}, for about {EVALUATION_S:.0f} seconds; this is done once.")
        search = SelfDraftSearch(target, cache.folder, EVALUATION_S)
        with cache.trying(key, str(requested)):
            choice = search.choose([requested])
        cache.remember(key, str(requested), choice)
    notice(f"Drafting by {choice.method}: {choice.reason}.")
    return choice.method


def search_when_idle(loaded: LoadedModel) -> None:
    """Searches for a self-draft that pays and remembers the result, for later loads under 'auto'.

    Does nothing if a draft model is loaded (`edgespec draft build` compares those), or if the result is known.
    Raises Unsupported, DoesNotFit, BackendError, CacheError, Cancelled.
    """
    planned, target = loaded.plan, loaded.engine.target
    if planned is None or planned.models or planned.options.exact or not _is_open(loaded.config):
        return
    key = current_setting(planned.backend, apply_settings(loaded.settings, planned).options)
    cache = SelfDraftCache(loaded.target_path, planned.name)
    if cache.look_up(key, AUTO) is None:
        search = SelfDraftSearch(target, cache.folder, EVALUATION_S)
        with cache.trying(key, AUTO):
            cache.remember(key, AUTO, search.choose(quick_methods(planned.backend)))


def _is_open(config: LoadConfig) -> bool:
    """Returns whether a self-draft may be chosen: a model on several ranks has none."""
    return config.draft == AUTO and config.draft_max != 0 and count_ranks() == 1


def set_self_draft(drafters: Sequence[DrafterPlan], method: SelfDraftSpec | None) -> list[DrafterPlan]:
    """`drafters` with the `method` that was chosen; one that nobody has named comes last."""
    if method is None:
        return list(drafters)
    found = [replace(each, self_draft=method) if each.spec.name == SELF else each for each in drafters]
    if all(each.spec.name != SELF for each in found):
        found.append(DrafterPlan(drafter_specs()[SELF], self_draft=method))
    return found
