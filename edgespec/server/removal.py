"""/api/delete: a model leaves the cache."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from edgespec.errors import HubError, UnknownModel
from edgespec.hub.hub import Hub
from edgespec.planner.plan import LoadConfig
from edgespec.planner.removal import list_cached_files, list_used_files, resolve_download
from edgespec.registry.schema import load_registry
from edgespec.server.http import HttpError
from edgespec.server.models import Models


async def remove_model(models: Models, config: LoadConfig) -> None:
    """Remove the files of `config.model` from the cache, as `edgespec rm` does.

    Raises HttpError (409) while a loaded model uses one of them, UnknownModel for what is not there.
    """
    loaded = {slot.name: slot.config for slot in models.slots.values() if slot.state != "unloaded"}
    await asyncio.to_thread(_remove, config, loaded)


def _remove(config: LoadConfig, loaded: dict[str, LoadConfig]) -> None:
    hub, registry = Hub.from_environment(), load_registry()
    reference = resolve_download(config, registry, hub)
    files = list_cached_files(reference, hub)
    for name, each in loaded.items():
        with suppress(UnknownModel):  # a file outside of the cache that has been moved since
            if files & list_used_files(each, registry, hub):
                raise HttpError(409, f"the loaded model '{name}' uses {reference}.", hint="Unload it first.")
    try:
        hub.remove(reference)
    except HubError as error:
        raise UnknownModel(f"{reference} is not downloaded.", hint="`edgespec list` shows what is.") from error
