"""One file from the hub into the shared Hugging Face cache: resumable, and checked before it becomes visible.

The client's own download keeps nothing when its process dies, so the bytes are fetched here, over the client's session
and credentials, into `blobs/<etag>.edgespec.incomplete`. Only a file whose size and hash are right takes its place in
the cache, under the client's own lock; the client then links it into the snapshot.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import CacheError, HubError, InvalidModelFile
from edgespec.hub.errors import FREE_SPACE
from edgespec.units import gib

# Called with the file's path, the bytes present and the bytes in all; at the start, and about once a MiB.
Progress = Callable[[str, int, int], None]

CHUNK_BYTES = 2**20
SPARE_BYTES = 64 * 2**20
ATTEMPTS = 5
_PAUSE_S = 1.0
_ETAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RemoteBytes:
    """One file at a fixed commit, as the hub's headers describe it; `size` is bytes."""

    path: str
    url: str
    etag: str
    size: int


class RangeReader:
    """A `ByteSource` that reads ranges of a remote file over the client's session."""

    def __init__(self, url: str, size: int) -> None:
        self.size = size
        self._url = url

    def read(self, offset: int, length: int) -> bytes:
        """Bytes `offset` to `offset + length`; raises what the client raises."""
        found = bytearray()
        for chunk in _ranged(self._url, offset, offset + length - 1):
            found += chunk
            if len(found) >= length:
                break
        return bytes(found[:length])


def describe(repo: str, path: str, commit: str, endpoint: str) -> RemoteBytes:
    """Ask the hub for one file's address, etag and size; raises what the client raises."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, path, revision=commit, endpoint=endpoint)
    found = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, endpoint=endpoint, library_name="edgespec")
    if found.etag is None or found.size is None or not _ETAG.fullmatch(found.etag):
        raise HubError(f"{endpoint} does not state size and identity of {path}.", hint="check HF_ENDPOINT")
    return RemoteBytes(path, url, found.etag, found.size)


def download_blob(remote: RemoteBytes, storage: Path, lock: Path, progress: Progress | None) -> Path:
    """Have `remote`'s bytes as a checked blob in `storage`, resuming an earlier try; returns the blob.

    `lock` is the client's own lock file for this blob. Raises InvalidModelFile where the bytes are not what the hub
    announced (they are removed), and what the client and the disk raise.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    blob = storage / "blobs" / remote.etag
    partial = _partial(blob.parent, remote)
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists() and blob.stat().st_size == remote.size:
            return blob
        _download(remote, partial, progress)
        difference = checksum_error(partial, remote.etag, remote.size)
        if difference is not None:
            partial.unlink()
            raise InvalidModelFile(
                f"{remote.path} arrived damaged: {difference}; the bad copy was removed.",
                hint="pull it again: edgespec pull",
            )
        os.replace(partial, blob)
    return blob


def checksum_error(path: Path, etag: str, size: int) -> str | None:
    """How the file differs from what the hub announced, or None; `etag` is a sha256 or a git blob hash, else unused."""
    found = path.stat().st_size
    if found != size:
        return f"it has {found:,} bytes, the hub announced {size:,}"
    if _SHA256.fullmatch(etag):
        name, digest = "sha256", hashlib.sha256()
    elif _GIT_SHA1.fullmatch(etag):
        name, digest = "git hash", hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    else:
        return None
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    actual = digest.hexdigest()
    return None if actual == etag else f"its {name} is {actual[:12]}..., the hub announced {etag[:12]}..."


def check_room(remote: RemoteBytes, storage: Path) -> None:
    """Raise CacheError where the disk of `storage` has no room for what is still missing of `remote`."""
    blobs = storage / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    partial = _partial(blobs, remote)
    missing = remote.size - (partial.stat().st_size if partial.exists() else 0)
    if missing <= 0 or (blobs / remote.etag).exists():
        return
    free = shutil.disk_usage(blobs).free
    if missing + SPARE_BYTES > free:
        raise CacheError(
            f"{remote.path} needs {gib(missing)} more and the disk of {blobs} has {gib(free)} free.",
            hint=FREE_SPACE,
        )


def _partial(blobs: Path, remote: RemoteBytes) -> Path:
    return blobs / f"{remote.etag}.edgespec.incomplete"


def _download(remote: RemoteBytes, partial: Path, progress: Progress | None) -> None:
    """Append what is missing to `partial`; a connection that breaks is taken up again a few times."""
    import httpx

    have = partial.stat().st_size if partial.exists() else 0
    if have > remote.size:
        partial.unlink()
        have = 0
    if progress:
        progress(remote.path, have, remote.size)
    failures = 0
    with open(partial, "ab", buffering=0) as file:
        while have < remote.size:
            before = have
            try:
                for chunk in _ranged(remote.url, have, remote.size - 1):
                    _write(file.fileno(), chunk[: remote.size - have])
                    have = min(have + len(chunk), remote.size)
                    if progress:
                        progress(remote.path, have, remote.size)
                    if have == remote.size:
                        break
                failures = failures + 1 if have == before else 0
                if failures >= ATTEMPTS:
                    raise httpx.ReadError("the server sends no more bytes")
            except httpx.TransportError:
                failures = failures + 1 if have == before else 1
                if failures >= ATTEMPTS:
                    raise
                time.sleep(_PAUSE_S)


def _write(descriptor: int, chunk: bytes) -> None:
    """Write all of `chunk`: a raw write may take only a part of it."""
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]


def _ranged(url: str, first: int, last: int) -> Iterator[bytes]:
    """The bytes from `first` on, in chunks; a server that ignores the range is read past the bytes before it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    headers = build_hf_headers(library_name="edgespec")
    headers |= {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        skip = 0 if response.status_code == 206 else first
        for chunk in response.iter_raw(CHUNK_BYTES):
            if skip >= len(chunk):
                skip -= len(chunk)
                continue
            yield chunk[skip:]
            skip = 0
