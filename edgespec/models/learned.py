"""What earlier answers have taught of a planned model and its drafters."""

from __future__ import annotations

from edgespec.autopilot.stats import DraftStats
from edgespec.autopilot.store import ProfileStore
from edgespec.errors import CacheError
from edgespec.models.drafts import describe_variant
from edgespec.models.hub import Hub
from edgespec.models.plan import Plan
from edgespec.models.resolve import find_local


def find_stats(planned: Plan, hub: Hub) -> DraftStats | None:
    """The newest statistics of the target with its drafters on this processor, under whatever settings.

    None if there are none, or if a file is not on this machine.
    """
    target = find_local(planned.target, hub)
    paths = [find_local(each.model.source, hub) for each in planned.drafters if each.model is not None]
    here = [path for path in paths if path is not None]
    if target is None or len(here) < len(paths):
        return None
    try:
        return ProfileStore(target, here, describe_variant(planned.drafters)).load_newest()
    except CacheError:
        return None
