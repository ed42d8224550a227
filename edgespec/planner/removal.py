"""Which files of the cache a name stands for, to remove them, and which files a load uses."""

from __future__ import annotations

from dataclasses import replace

from edgespec.errors import HubError, UnknownModel
from edgespec.hub.hub import Hub
from edgespec.hub.reference import Alias, HubFile, HubQuant, HubReference, HubRepo, parse_reference
from edgespec.planner.draft_request import NONE
from edgespec.planner.plan import LoadConfig, choose_backend, plan
from edgespec.registry.resolve import HubGguf, HubMlx
from edgespec.registry.schema import Registry

File = tuple[str, str]
"""A repository and the path of a file in it."""


def resolve_download(request: LoadConfig, registry: Registry, hub: Hub) -> HubReference:
    """The model of the hub that `request` names; an alias names its target alone. Raises UnknownModel, HubError."""
    reference = parse_reference(request.model or "")
    if isinstance(reference, Alias):
        pair = registry.get(reference.name).pair(choose_backend(request, registry, hub))
        reference = pair.target if pair else reference
    if not isinstance(reference, HubRepo | HubQuant | HubFile):
        raise UnknownModel(
            f"{request.model} is not a downloaded model.", hint="`edgespec list` shows the downloaded models."
        )
    return reference


def list_cached_files(reference: HubReference, hub: Hub) -> set[File]:
    """The files of a model that the cache holds as a whole; none otherwise."""
    model = hub.find_cached(reference)
    return set() if model is None else {(model.repo, file.path) for file in model.files}


def list_used_files(request: LoadConfig, registry: Registry, hub: Hub) -> set[File]:
    """The files of the cache that a load of `request` opens, with those of its drafters. Sends no request.

    Raises what `plan` raises.
    """
    offline = replace(hub, offline=True)
    try:
        planned = plan(replace(request, force=True), registry, offline, _Quiet())
    except HubError:  # its draft was removed since
        planned = plan(replace(request, force=True, draft=NONE), registry, offline, _Quiet())
    models = [source.model for source in planned.sources if isinstance(source, HubGguf | HubMlx)]
    return {(model.repo, file.path) for model in models for file in model.files}


class _Quiet:
    """A Reporter that says nothing."""

    def notice(self, text: str) -> None: ...

    def download(self, name: str, done: int, total: int) -> None: ...

    def loading(self, name: str, fraction: float) -> None: ...
