"""Trained heads in the folder of their target: GGUF files beside a GGUF file, folders beside a folder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from edgespec.hub.cache import snapshot_path
from edgespec.hub.file_selection import is_model_file, list_parts
from edgespec.hub.hub import Hub
from edgespec.registry.heads import is_head
from edgespec.registry.resolve import HubGguf, LocalGguf, LocalMlx, Source

MAX_ENTRIES = 256  # of the target's folder
MAX_LOOKS = 32  # files or folders whose first bytes are read


def list_sidecars(target: Source, hub: Hub) -> list[Path]:
    """The heads beside a local target, by name. Looks into 32 of the folder's first 256 entries at most."""
    if isinstance(target, LocalGguf):
        found = _list_files(target.path)
    elif isinstance(target, HubGguf):
        found = _list_files(snapshot_path(hub.cache_dir, target.model, target.model.files[0].path))
    elif isinstance(target, LocalMlx):
        found = _list_folders(target.path.resolve())
    else:
        return []
    try:
        return [path for path in islice(found, MAX_LOOKS) if is_head(path)]
    except OSError:  # a folder that cannot be listed
        return []


def _list_files(target: Path) -> Iterator[Path]:
    own = list_parts(target.name)
    for path in _list_entries(target.parent):
        if path.name not in own and is_model_file(path.name) and path.is_file():
            yield path


def _list_folders(target: Path) -> Iterator[Path]:
    for path in _list_entries(target.parent):
        if path.name != target.name and (path / "config.json").is_file():
            yield path


def _list_entries(folder: Path) -> list[Path]:
    return sorted(islice(folder.iterdir(), MAX_ENTRIES))
