"""The self-draft of a model: the requested one, or the one that a search in idle time has found to pay."""

from __future__ import annotations

from pathlib import Path

from edgespec.backends import Model
from edgespec.backends.attached_draft import SelfDraftSpec, Skip, Unsupported
from edgespec.backends.ranks import count_ranks
from edgespec.controller.store import ProfileKey
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import DoesNotFit
from edgespec.planner.draft_request import AUTO
from edgespec.planner.plan import LoadConfig, Plan, Reporter
from edgespec.planner.selfdraft_search import EVALUATION_S, SelfDraftCache, SelfDraftSearch, quick_methods
from edgespec.service.loaded_model import LoadedModel
from edgespec.service.settings import apply_settings


def choose_self_draft(
    config: LoadConfig, planned: Plan, target: Model, target_path: Path, key: ProfileKey,
    reporter: Reporter, check: CheckCancelled,
) -> SelfDraftSpec | None:  # fmt: skip
    """The self-draft to use; None for none.

    The layers of a requested one are searched and remembered under `key`; 'auto' takes what `search_when_idle` has
    remembered. Raises Unsupported for a requested method that the model has not, BackendError, CacheError, Cancelled.
    """
    requested = planned.self_draft
    if requested is not None and requested.skip != Skip():
        return requested
    cache = SelfDraftCache(target_path, planned.name)
    if requested is None:
        choice = cache.look_up(key, AUTO) if _is_open(config) else None
        return choice.method if choice is not None and choice.pays else None
    choice = cache.look_up(key, str(requested))
    if choice is None:
        reporter.notice(
            f"Searching the layers of {requested}, for about {EVALUATION_S:.0f} seconds; this is done once."
        )
        search = SelfDraftSearch(target, cache.folder, EVALUATION_S, check, reporter.loading)
        choice = search.choose([requested])
        cache.remember(key, str(requested), choice)
    reporter.notice(f"Drafting by {choice.method}: {choice.reason}.")
    return choice.method


def search_when_idle(loaded: LoadedModel, check: CheckCancelled) -> None:
    """Searches for a self-draft that pays and remembers the result, for later loads under 'auto'.

    Does nothing where a draft model is loaded, `edgespec draft build` compares those, or where the result is known.
    Raises BackendError, CacheError, Cancelled.
    """
    planned, target = loaded.planned, loaded.engine.target
    if planned is None or planned.models or planned.options.exact or not _is_open(loaded.config):
        return
    key = ProfileKey.current(planned.backend, apply_settings(loaded.settings, planned).options)
    cache = SelfDraftCache(loaded.target_path, planned.name)
    if cache.look_up(key, AUTO) is None:
        search = SelfDraftSearch(target, cache.folder, EVALUATION_S, check, lambda name, fraction: None)
        try:
            cache.remember(key, AUTO, search.choose(quick_methods(planned.backend)))
        except (Unsupported, DoesNotFit):
            return


def _is_open(config: LoadConfig) -> bool:
    """Returns whether a self-draft may be chosen: a model on several ranks has none."""
    return config.draft == AUTO and config.draft_max != 0 and count_ranks() == 1
