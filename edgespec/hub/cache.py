"""The Hugging Face cache on this machine: where it is, what it holds, and removing a model from it.

The layout is the client's (blobs, refs, snapshots); other tools share it, so only links and blobs of the model asked
for are ever touched.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import HubError
from edgespec.files import write_atomically
from edgespec.hub.errors import HubContext
from edgespec.hub.file_selection import Kind, RemoteFile, is_model_file, part_names, select
from edgespec.hub.reference import HubFile, HubQuant, HubReference, HubRepo

DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The files of one model at a fixed commit; `revision` is the branch or tag that led there."""

    repo: str
    revision: str
    commit: str
    kind: Kind
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache: `reference` opens it, `size` is bytes on disk, `last_used_s` is seconds since 1970."""

    reference: HubReference
    commit: str
    kind: Kind
    size: int
    path: Path
    last_used_s: float


def cache_dir_from_environment() -> Path:
    """The client's cache folder, by the rules of the client: HF_HUB_CACHE, then HF_HOME, then XDG_CACHE_HOME."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if stated := os.environ.get(name):
            return _expanded(stated)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def is_commit(text: str) -> bool:
    """True for a full commit hash, the only thing that names a snapshot folder."""
    return _COMMIT.fullmatch(text) is not None


def storage_folder(cache_dir: Path, repo: str) -> Path:
    """The folder of one repository in the cache."""
    return cache_dir / f"models--{repo.replace('/', '--')}"


def blob_lock(cache_dir: Path, repo: str, etag: str) -> Path:
    """The lock file that the client takes while it writes this blob."""
    return cache_dir / ".locks" / storage_folder(cache_dir, repo).name / f"{etag}.lock"


def remember_revision(cache_dir: Path, model: RemoteModel) -> None:
    """Note which commit the branch or tag led to, so that it is found without the network."""
    if model.revision == model.commit:
        return
    ref = storage_folder(cache_dir, model.repo) / "refs" / model.revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(ref, model.commit)


def cached_model(cache_dir: Path, reference: HubReference, endpoint: str) -> RemoteModel | None:
    """The model `reference` means, if the cache has all of its files; no network is used."""
    storage = storage_folder(cache_dir, reference.repo)
    revision = reference.revision or DEFAULT_REVISION
    commit = _commit(storage, revision)
    if commit is None:
        return None
    snapshot = storage / "snapshots" / commit
    subject = HubContext(endpoint, str(cache_dir), reference.repo, revision)
    try:
        chosen = select(reference, _listing(snapshot), subject)
    except HubError:
        return None
    if chosen.kind == "mlx" and not _shards_complete(snapshot):
        return None
    return RemoteModel(reference.repo, revision, commit, chosen.kind, chosen.files)


def snapshot_path(cache_dir: Path, model: RemoteModel, path: str) -> Path:
    """Where the snapshot has a file of `model`, present or not."""
    return storage_folder(cache_dir, model.repo) / "snapshots" / model.commit / Path(*path.split("/"))


def cached_models(cache_dir: Path) -> list[CachedModel]:
    """All models the cache holds whole, by reference; other repositories are left out."""
    found: list[CachedModel] = []
    for storage in sorted(cache_dir.glob("models--*--*")):
        repo = storage.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted(storage.glob("snapshots/*")):
            found += _models_in(repo, snapshot)
    return found


def remove_model(cache_dir: Path, reference: HubReference) -> int:
    """Remove what `reference` means from the cache; returns the bytes freed on disk.

    A repository reference without a quantisation removes the repository with all its files. Blobs that another
    revision still links to stay. Raises HubError where nothing matches.
    """
    storage = storage_folder(cache_dir, reference.repo)
    links = [link for link in _links(storage) if _meant(reference, storage, link)]
    if not links:
        raise HubError(f"{reference} is not in the cache at {cache_dir}.", hint="edgespec list shows what is")
    blobs = {link.resolve() for link in links}
    for link in links:
        link.unlink()
    blobs -= {link.resolve() for link in _links(storage)}
    freed = 0
    for blob in blobs:
        if blob.is_file():
            freed += blob.stat().st_size
            blob.unlink()
    if not _links(storage):
        _remove_leftovers(storage)
    return freed


def discard(link: Path) -> None:
    """Remove one snapshot file and the blob behind it, because its content is bad."""
    blob = link.resolve()
    link.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(text)))


def _commit(storage: Path, revision: str) -> str | None:
    try:
        commit = (storage / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    return commit if is_commit(commit) and (storage / "snapshots" / commit).is_dir() else None


def _listing(snapshot: Path) -> tuple[RemoteFile, ...]:
    found = []
    for link in sorted(snapshot.rglob("*")):
        if link.is_file():
            blob = link.resolve().name
            sha256 = blob if _SHA256.fullmatch(blob) else None
            found.append(RemoteFile(link.relative_to(snapshot).as_posix(), link.stat().st_size, sha256))
    return tuple(found)


def _shards_complete(snapshot: Path) -> bool:
    """True where every weight file that the index names is there (a model in one file has no index)."""
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return True
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(isinstance(shard, str) and (snapshot / shard).is_file() for shard in shards)


def _models_in(repo: str, snapshot: Path) -> list[CachedModel]:
    """The models of one snapshot: each GGUF file or complete set of parts, or the folder as an MLX model."""
    listing = _listing(snapshot)
    revision = _revision_of(snapshot)
    references: list[HubReference] = [
        HubFile(repo, file.path, revision) for file in listing if is_model_file(file.path)
    ]
    found = []
    for reference in references or [HubRepo(repo, revision)]:
        try:
            chosen = select(reference, listing, HubContext("", "", repo, revision))
        except HubError:
            continue
        if chosen.kind == "mlx" and not _shards_complete(snapshot):
            continue
        first = snapshot / chosen.files[0].path
        size = sum(file.size for file in chosen.files)
        place = first if chosen.kind == "gguf" else snapshot
        found.append(CachedModel(reference, snapshot.name, chosen.kind, size, place, first.stat().st_atime))
    return found


def _revision_of(snapshot: Path) -> str | None:
    """None for the default branch's commit, else the branch, tag or commit that leads here."""
    refs = snapshot.parent.parent / "refs"
    names = [
        ref.relative_to(refs).as_posix()
        for ref in sorted(refs.rglob("*"))
        if ref.is_file() and _commit(refs.parent, ref.relative_to(refs).as_posix()) == snapshot.name
    ]
    if DEFAULT_REVISION in names:
        return None
    return names[0] if names and "/" not in names[0] else snapshot.name


def _links(storage: Path) -> list[Path]:
    return [link for link in storage.glob("snapshots/*/**/*") if not link.is_dir()]


def _meant(reference: HubReference, storage: Path, link: Path) -> bool:
    commit, *parts = link.relative_to(storage / "snapshots").parts
    if reference.revision is not None and _commit(storage, reference.revision) != commit:
        return False
    path = "/".join(parts)
    if isinstance(reference, HubFile):
        return path in part_names(reference.path)
    if isinstance(reference, HubQuant):
        subject = HubContext("", "", reference.repo)
        try:
            chosen = select(reference, _listing(storage / "snapshots" / commit), subject)
        except HubError:
            return False
        return path in {file.path for file in chosen.files}
    return True


def _remove_leftovers(storage: Path) -> None:
    """Remove a repository folder that holds no model file any more, unfinished downloads included."""
    for top, folders, files in os.walk(storage, topdown=False):
        for name in files:
            os.unlink(os.path.join(top, name))
        for name in folders:
            os.rmdir(os.path.join(top, name))
    os.rmdir(storage)
