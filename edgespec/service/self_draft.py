"""The self-draft of a model at its load: the requested one, the remembered one, or the best of a short search."""

from __future__ import annotations

from pathlib import Path

from edgespec.backends import Model
from edgespec.backends.attached_draft import SelfDraftSpec, Skip, Unsupported
from edgespec.backends.ranks import count_ranks
from edgespec.controller.store import ProfileKey
from edgespec.core.protocols import CheckCancelled
from edgespec.planner.draft_request import AUTO
from edgespec.planner.plan import LoadConfig, Plan, Reporter
from edgespec.planner.selfdraft_search import EVALUATION_S, SelfDraftCache, SelfDraftSearch, quick_methods


def choose_self_draft(
    config: LoadConfig, planned: Plan, target: Model, target_path: Path, key: ProfileKey,
    reporter: Reporter, check: CheckCancelled,
) -> SelfDraftSpec | None:  # fmt: skip
    """The self-draft to use; None for none. What a search finds is remembered under `key`.

    Raises Unsupported for a requested method that the model has not, BackendError, CacheError, Cancelled.
    """
    requested = planned.self_draft
    if requested is not None and requested.skip != Skip():
        return requested
    if requested is None and (config.draft != AUTO or config.draft_max == 0):
        return None
    cache = SelfDraftCache(target_path, planned.name)
    choice = cache.look_up(key, str(requested or "auto"))
    if choice is None and requested is None and planned.models:
        return None  # there is a draft model; `edgespec draft build` compares them
    if requested is None and count_ranks() > 1:
        reporter.notice("Drafting without a self-draft: a model on several ranks has none.")
        return None
    if choice is None:
        reporter.notice(
            f"Searching for a self-draft of the model, for about {EVALUATION_S:.0f} seconds; this is done once."
        )
        search = SelfDraftSearch(target, cache.folder, EVALUATION_S, check, reporter.loading)
        try:
            choice = search.choose([requested] if requested is not None else quick_methods(planned.backend))
        except Unsupported as refusal:
            if requested is not None:
                raise
            reporter.notice(f"Drafting without a self-draft: {refusal.message}")
            return None
        cache.remember(key, str(requested or "auto"), choice)
    if requested is None and not choice.pays:
        reporter.notice(f"No self-draft is expected to pay ({choice.method}: {choice.reason}).")
        return None
    reporter.notice(f"Drafting by {choice.method}: {choice.reason}.")
    return choice.method
