"""The Hugging Face cache on this machine: its location, its models, and the removal of a model.

The layout is the client's (blobs, refs, snapshots). Other tools share the cache, so only links and blobs of the
requested model are changed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgespecError, HubError
from edgespec.files import write_atomically
from edgespec.formats.mlx_folder import INDEX, find_missing_shards, read_json
from edgespec.models.file_selection import Kind, RemoteFile, Selection, is_model_file, list_parts, select_files
from edgespec.models.hub_errors import HubContext
from edgespec.models.references import DEFAULT_REVISION, HubFile, HubReference, HubRepo


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The files of one model at a fixed commit; `revision` is the branch or tag that was resolved."""

    repo: str
    revision: str
    commit: str
    kind: Kind
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache: `reference` opens it, `size` is its bytes, `last_used_s` is in seconds since 1970."""

    reference: HubReference
    commit: str
    kind: Kind
    size: int
    path: Path
    last_used_s: float


def locate_cache_dir() -> Path:
    """The client's cache folder, by the client's rules: HF_HUB_CACHE, then HF_HOME, then XDG_CACHE_HOME."""
    stated = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(stated or os.path.join(home, "hub"))))


def is_commit(text: str) -> bool:
    """True for a full commit hash, as in the names of snapshot folders."""
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None


def storage_folder(cache_dir: Path, repo: str) -> Path:
    return cache_dir / f"models--{repo.replace('/', '--')}"


def blob_lock(cache_dir: Path, repo: str, etag: str) -> Path:
    """The lock file that the client holds while it writes this blob."""
    return cache_dir / ".locks" / storage_folder(cache_dir, repo).name / f"{etag}.lock"


def remember_revision(cache_dir: Path, model: RemoteModel) -> None:
    """Store the commit of the branch or tag, so that it can be resolved offline."""
    if model.revision == model.commit:
        return
    ref = storage_folder(cache_dir, model.repo) / "refs" / model.revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(ref, model.commit)


def find_model(cache_dir: Path, reference: HubReference) -> RemoteModel | None:
    """The model that `reference` names, if the cache has all its files; None otherwise. Sends no request."""
    storage = storage_folder(cache_dir, reference.repo)
    revision = reference.revision or DEFAULT_REVISION
    commit = _read_commit(storage, revision)
    chosen = _select_complete(reference, storage / "snapshots" / commit) if commit else None
    return RemoteModel(reference.repo, revision, commit, *chosen) if commit and chosen else None


def snapshot_path(cache_dir: Path, model: RemoteModel, path: str) -> Path:
    """The path of a file of `model` in the snapshot, whether or not it exists."""
    return storage_folder(cache_dir, model.repo) / "snapshots" / model.commit / Path(*path.split("/"))


def list_models(cache_dir: Path) -> list[CachedModel]:
    """All complete models in the cache; other repositories are left out."""
    found: list[CachedModel] = []
    for storage in sorted(cache_dir.glob("models--*--*")):
        repo = storage.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted(storage.glob("snapshots/*")):
            found += _list_snapshot_models(repo, snapshot)
    return found


def remove_model(cache_dir: Path, reference: HubReference, confirm: Callable[[], object]) -> int:
    """Remove the model that `reference` names from the cache; returns the bytes freed on disk.

    A reference to a repository removes all its files. Blobs that another revision links to are kept. `confirm` is
    called before. Raises HubError if nothing matches, and what `confirm` raises.
    """
    storage = storage_folder(cache_dir, reference.repo)
    links = [link for snapshot in storage.glob("snapshots/*") for link in _list_named(reference, snapshot)]
    if not links:
        hint = "Run `edgespec list` to see the cached models."
        raise HubError(f"{reference} is not in the cache at {cache_dir}.", hint=hint)
    confirm()
    blobs = {link.resolve() for link in links}
    for link in links:
        link.unlink()
    kept = {link.resolve() for snapshot in storage.glob("snapshots/*") for link in _list_links(snapshot)}
    freed = 0
    for blob in blobs - kept:
        if blob.is_file():
            freed += blob.stat().st_size
            blob.unlink()
    if not kept:
        shutil.rmtree(storage)  # only unfinished downloads and refs are left
    return freed


def discard(link: Path) -> None:
    """Remove a damaged snapshot file and its blob."""
    blob = link.resolve()
    link.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


def _read_commit(storage: Path, revision: str) -> str | None:
    try:
        commit = (storage / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    return commit if is_commit(commit) and (storage / "snapshots" / commit).is_dir() else None


def _list_files(snapshot: Path) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(link.relative_to(snapshot).as_posix(), link.stat().st_size, link.resolve().name)
        for link in sorted(snapshot.rglob("*"))
        if link.is_file()
    )


def _select_complete(
    reference: HubReference, snapshot: Path, listing: tuple[RemoteFile, ...] | None = None
) -> Selection | None:
    """The files of a snapshot that `reference` names; None if some are missing."""
    try:
        chosen = select_files(reference, listing or _list_files(snapshot), HubContext("", "", reference.repo))
    except HubError:
        return None
    return chosen if chosen[0] == "gguf" or _has_all_shards(snapshot) else None


def _has_all_shards(snapshot: Path) -> bool:
    """True if no weight file named in the index is missing; a model in one file has no index."""
    try:
        return not (snapshot / INDEX).is_file() or not find_missing_shards(snapshot, read_json(snapshot / INDEX))
    except EdgespecError:
        return False


def _list_snapshot_models(repo: str, snapshot: Path) -> list[CachedModel]:
    """The models of one snapshot: each GGUF file or complete set of parts, or the whole folder for MLX."""
    is_default = _read_commit(snapshot.parents[1], DEFAULT_REVISION) == snapshot.name
    revision, listing = None if is_default else snapshot.name, _list_files(snapshot)
    references: list[HubReference] = [
        HubFile(repo, file.path, revision) for file in listing if is_model_file(file.path)
    ]
    found = []
    for reference in references or [HubRepo(repo, revision)]:
        if (chosen := _select_complete(reference, snapshot, listing)) is not None:
            kind, files = chosen
            first, size = snapshot / files[0].path, sum(file.size for file in files)
            place = first if kind == "gguf" else snapshot
            found.append(CachedModel(reference, snapshot.name, kind, size, place, first.stat().st_atime))
    return found


def _list_links(snapshot: Path) -> list[Path]:
    return [link for link in snapshot.rglob("*") if not link.is_dir()]


def _list_named(reference: HubReference, snapshot: Path) -> list[Path]:
    """The links of a snapshot that belong to a model, which may be incomplete."""
    storage = snapshot.parent.parent
    if reference.revision is not None and _read_commit(storage, reference.revision) != snapshot.name:
        return []
    links = _list_links(snapshot)
    if isinstance(reference, HubRepo):
        return links
    if isinstance(reference, HubFile):
        named: tuple[str, ...] = list_parts(reference.path)
    else:
        chosen = _select_complete(reference, snapshot)
        named = tuple(file.path for file in chosen[1]) if chosen else ()
    return [link for link in links if link.relative_to(snapshot).as_posix() in named]
