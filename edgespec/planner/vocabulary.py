"""The tokenizer of a model that is on this machine, without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from edgespec.backends import open_tokenizer
from edgespec.errors import UnknownModel
from edgespec.hub.errors import HubUnreachable
from edgespec.hub.hub import Hub
from edgespec.planner.plan import LoadConfig, choose_backend
from edgespec.registry.resolve import fetch_source, read_metadata, resolve_pair
from edgespec.registry.schema import Registry
from edgespec.text.tokenizer import Tokenizer


@contextmanager
def open_vocabulary(request: LoadConfig, registry: Registry, hub: Hub) -> Iterator[Tokenizer]:
    """The tokenizer of the target that `request` names, valid inside of the block. Sends no request.

    Raises UnknownModel, also for a model that is not downloaded, InvalidModelFile, BackendUnavailable, CacheError.
    """
    offline = replace(hub, offline=True)
    try:
        backend = choose_backend(request, registry, offline)
        target = resolve_pair(request.model, backend, registry, offline).target
        read_metadata(target, offline)
        path = fetch_source(target, offline)
    except HubUnreachable as error:
        command = f"edgespec pull {request.model}"
        raise UnknownModel(f"{request.model} is not downloaded.", hint=f"Run `{command}` first.") from error
    with open_tokenizer(backend, path) as tokenizer:
        yield tokenizer
