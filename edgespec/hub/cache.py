"""The Hugging Face cache on this machine: its location, its models, and the removal of a model.

The layout is the client's (blobs, refs, snapshots). Other tools share the cache, so only links and blobs of the
requested model are changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import HubError
from edgespec.files import write_atomically
from edgespec.hub.errors import HubContext
from edgespec.hub.file_selection import Kind, RemoteFile, is_model_file, list_parts, select_files
from edgespec.hub.reference import HubFile, HubQuant, HubReference, HubRepo

DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
        """Bytes of all files."""
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
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if stated := os.environ.get(name):
            return _expand(stated)
    if home := os.environ.get("HF_HOME"):
        return _expand(home) / "hub"
    return _expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def is_commit(text: str) -> bool:
    """True for a full commit hash, as in the names of snapshot folders."""
    return _COMMIT.fullmatch(text) is not None


def storage_folder(cache_dir: Path, repo: str) -> Path:
    """The folder of one repository in the cache."""
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


def find_model(cache_dir: Path, reference: HubReference, endpoint: str) -> RemoteModel | None:
    """The model that `reference` names, if the cache has all its files; None otherwise. Sends no request."""
    storage = storage_folder(cache_dir, reference.repo)
    revision = reference.revision or DEFAULT_REVISION
    commit = _read_commit(storage, revision)
    if commit is None:
        return None
    snapshot = storage / "snapshots" / commit
    context = HubContext(endpoint, str(cache_dir), reference.repo, revision)
    try:
        chosen = select_files(reference, _list_files(snapshot), context)
    except HubError:
        return None
    if chosen.kind == "mlx" and not _has_all_shards(snapshot):
        return None
    return RemoteModel(reference.repo, revision, commit, chosen.kind, chosen.files)


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


def remove_model(cache_dir: Path, reference: HubReference) -> int:
    """Remove the model that `reference` names from the cache; returns the bytes freed on disk.

    A reference to a repository removes all its files. Blobs that another revision links to are kept. Raises HubError if
    nothing matches.
    """
    storage = storage_folder(cache_dir, reference.repo)
    links = [link for link in _list_links(storage) if _matches(reference, storage, link)]
    if not links:
        hint = "Run `edgespec list` to see the cached models."
        raise HubError(f"{reference} is not in the cache at {cache_dir}.", hint=hint)
    blobs = {link.resolve() for link in links}
    for link in links:
        link.unlink()
    blobs -= {link.resolve() for link in _list_links(storage)}
    freed = 0
    for blob in blobs:
        if blob.is_file():
            freed += blob.stat().st_size
            blob.unlink()
    if not _list_links(storage):
        shutil.rmtree(storage)  # only unfinished downloads and refs are left
    return freed


def discard(link: Path) -> None:
    """Remove a damaged snapshot file and its blob."""
    blob = link.resolve()
    link.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


def _expand(text: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(text)))


def _read_commit(storage: Path, revision: str) -> str | None:
    try:
        commit = (storage / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    return commit if is_commit(commit) and (storage / "snapshots" / commit).is_dir() else None


def _list_files(snapshot: Path) -> tuple[RemoteFile, ...]:
    found = []
    for link in sorted(snapshot.rglob("*")):
        if link.is_file():
            blob = link.resolve().name
            sha256 = blob if _SHA256.fullmatch(blob) else None
            found.append(RemoteFile(link.relative_to(snapshot).as_posix(), link.stat().st_size, sha256))
    return tuple(found)


def _has_all_shards(snapshot: Path) -> bool:
    """True if every weight file named in the index exists; a model in one file has no index."""
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return True
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(isinstance(shard, str) and (snapshot / shard).is_file() for shard in shards)


def _list_snapshot_models(repo: str, snapshot: Path) -> list[CachedModel]:
    """The models of one snapshot: each GGUF file or complete set of parts, or the whole folder for MLX."""
    listing = _list_files(snapshot)
    revision = _find_revision(snapshot)
    references: list[HubReference] = [
        HubFile(repo, file.path, revision) for file in listing if is_model_file(file.path)
    ]
    found = []
    for reference in references or [HubRepo(repo, revision)]:
        try:
            chosen = select_files(reference, listing, HubContext("", "", repo, revision))
        except HubError:
            continue
        if chosen.kind == "mlx" and not _has_all_shards(snapshot):
            continue
        first = snapshot / chosen.files[0].path
        size = sum(file.size for file in chosen.files)
        place = first if chosen.kind == "gguf" else snapshot
        found.append(CachedModel(reference, snapshot.name, chosen.kind, size, place, first.stat().st_atime))
    return found


def _find_revision(snapshot: Path) -> str | None:
    """The branch, tag or commit of a snapshot; None for the default branch."""
    refs = snapshot.parent.parent / "refs"
    names = [
        ref.relative_to(refs).as_posix()
        for ref in sorted(refs.rglob("*"))
        if ref.is_file() and _read_commit(refs.parent, ref.relative_to(refs).as_posix()) == snapshot.name
    ]
    if DEFAULT_REVISION in names:
        return None
    return names[0] if names and "/" not in names[0] else snapshot.name


def _list_links(storage: Path) -> list[Path]:
    return [link for link in storage.glob("snapshots/*/**/*") if not link.is_dir()]


def _matches(reference: HubReference, storage: Path, link: Path) -> bool:
    commit, *parts = link.relative_to(storage / "snapshots").parts
    if reference.revision is not None and _read_commit(storage, reference.revision) != commit:
        return False
    path = "/".join(parts)
    if isinstance(reference, HubFile):
        return path in list_parts(reference.path)
    if isinstance(reference, HubQuant):
        context = HubContext("", "", reference.repo)
        try:
            chosen = select_files(reference, _list_files(storage / "snapshots" / commit), context)
        except HubError:
            return False
        return path in {file.path for file in chosen.files}
    return True
