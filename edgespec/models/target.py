"""The runtime and the target of a model, found without opening it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from edgespec.backends import FileBackend, open_tokenizer, prefers_mlx
from edgespec.errors import HubError, UnknownModel
from edgespec.formats.head_file import ModelMetadata
from edgespec.models.file_facts import FileFacts, describe_file
from edgespec.models.hub import Hub
from edgespec.models.hub_errors import HubUnreachable
from edgespec.models.load_config import LoadConfig
from edgespec.models.registry import Entry, Registry
from edgespec.models.resolve import Source, detect_backend, fetch_source, read_metadata, resolve_pair
from edgespec.text.tokenizer import Tokenizer


def choose_backend(request: LoadConfig, registry: Registry, hub: Hub) -> FileBackend:
    """The requested runtime, else MLX on Apple Silicon if it is installed and has the model, else llama.cpp.

    Raises UnknownModel, HubError.
    """
    if request.backend in ("llamacpp", "mlx"):
        return request.backend
    if request.load.workers:
        return "llamacpp"
    return detect_backend(request.model, registry, hub, prefer_mlx=prefers_mlx())


def check_target(request: LoadConfig, registry: Registry, hub: Hub) -> FileFacts | None:
    """What the file of a model tells; None for one that is not downloaded, and for the toy's.

    Raises UnknownModel, InvalidModelFile, BackendUnavailable or CacheError for a model that no load could open, as far
    as that is known without the network: a model that is not downloaded may still be.
    """
    if request.backend == "toy":
        return None
    with suppress(HubError):
        return describe_file(_find_target(request, registry, hub)[2])
    return None


@contextmanager
def naming_entry(request: LoadConfig, registry: Registry) -> Iterator[None]:
    """If the hub cannot be reached, name in the error what an alias stands for, and a command that needs no network."""
    try:
        yield
    except HubUnreachable as error:
        name = request.model or registry.default
        entry = registry.entries.get(name)
        if entry is None:
            raise
        raise HubUnreachable(
            f"{name} is {_list_files(entry)}, not downloaded yet: {error.message}",
            hint=f"`edgespec plan {name}` tells without a network what to expect of it.",
        ) from error


def _list_files(entry: Entry) -> str:
    """The target and the draft model of an alias, and the number of its parameters."""
    pair = entry.gguf or entry.mlx
    assert pair is not None
    size = f" ({entry.about.parameters:g} billion parameters)" if entry.about.parameters else ""
    return f"{pair.target}{size} with the draft {pair.draft}" if pair.draft else f"{pair.target}{size}"


def _find_target(request: LoadConfig, registry: Registry, hub: Hub) -> tuple[FileBackend, Source, ModelMetadata]:
    """The runtime, the target, and its metadata, which were checked; no request is sent."""
    offline = replace(hub, offline=True)
    backend = choose_backend(request, registry, offline)
    target = resolve_pair(request.model, backend, registry, offline).target
    return backend, target, read_metadata(target, offline)


@contextmanager
def open_vocabulary(request: LoadConfig, registry: Registry, hub: Hub) -> Iterator[Tokenizer]:
    """The tokenizer of the target that `request` names, valid inside of the block. Sends no request.

    Raises UnknownModel, also for a model that is not downloaded, InvalidModelFile, BackendUnavailable, CacheError.
    """
    try:
        backend, target, _ = _find_target(request, registry, hub)
        path = fetch_source(target, replace(hub, offline=True))
    except HubUnreachable as error:
        command = f"edgespec pull {request.model}"
        raise UnknownModel(f"{request.model} is not downloaded.", hint=f"Run `{command}` first.") from error
    with open_tokenizer(backend, path) as tokenizer:
        yield tokenizer
