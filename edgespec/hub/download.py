"""Downloads of single files from the hub into the shared Hugging Face cache: resumable and verified.

The client's own download keeps nothing when its process is killed. Therefore the bytes are fetched here, with the
client's session and credentials, into `blobs/<etag>.edgespec.incomplete`. After size and hash have been verified, the
file becomes a blob, under the client's own lock, and the client links it into the snapshot.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import CacheError, HubError, InvalidModelFile
from edgespec.hub.errors import FREE_SPACE
from edgespec.units import gib

# Called with the file's path, the bytes present and the total; at the start, about once per MiB, and every half second
# while nothing arrives. What it raises ends the download.
Progress = Callable[[str, int, int], None]

CHUNK_BYTES = 2**20
SPARE_BYTES = 64 * 2**20
ATTEMPTS = 5
_PAUSE_S = 1.0
_STALL_S = 0.5
_ETAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RemoteBlob:
    """One file at a fixed commit, as described by the hub's headers; `size` is in bytes."""

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
        """Bytes `offset` to `offset + length`. Raises the client's errors."""
        found = bytearray()
        for chunk in _stream_range(self._url, offset, offset + length - 1):
            found += chunk
            if len(found) >= length:
                break
        return bytes(found[:length])


def request_blob(repo: str, path: str, commit: str, endpoint: str) -> RemoteBlob:
    """Request a file's address, etag and size from the hub. Raises HubError and the client's errors."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, path, revision=commit, endpoint=endpoint)
    found = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, endpoint=endpoint, library_name="edgespec")
    if found.etag is None or found.size is None or not _ETAG.fullmatch(found.etag):
        raise HubError(f"{endpoint} does not state the size and hash of {path}.", hint="Check HF_ENDPOINT.")
    return RemoteBlob(path, url, found.etag, found.size)


def download_blob(remote: RemoteBlob, storage: Path, lock: Path, progress: Progress | None) -> Path:
    """Download `remote` to a verified blob in `storage`, resuming an earlier attempt; returns the blob.

    `lock` is the client's lock file for this blob. Raises InvalidModelFile, after removing the file, if size or hash
    differ from the hub's, and the errors of the client and the disk.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    blob = storage / "blobs" / remote.etag
    partial = _partial_path(blob.parent, remote)
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
                hint="Pull it again with `edgespec pull`.",
            )
        os.replace(partial, blob)
    return blob


def checksum_error(path: Path, etag: str, size: int) -> str | None:
    """How the file differs from the hub's size and hash, or None. Only sha256 and git hashes are compared."""
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


def check_disk_space(remote: RemoteBlob, storage: Path) -> None:
    """Raise CacheError if the disk of `storage` has no space for the missing bytes of `remote`."""
    blobs = storage / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    partial = _partial_path(blobs, remote)
    missing = remote.size - (partial.stat().st_size if partial.exists() else 0)
    if missing <= 0 or (blobs / remote.etag).exists():
        return
    free = shutil.disk_usage(blobs).free
    if missing + SPARE_BYTES > free:
        raise CacheError(
            f"{remote.path} needs {gib(missing)} more and the disk of {blobs} has {gib(free)} free.",
            hint=FREE_SPACE,
        )


def _partial_path(blobs: Path, remote: RemoteBlob) -> Path:
    return blobs / f"{remote.etag}.edgespec.incomplete"


def _download(remote: RemoteBlob, partial: Path, progress: Progress | None) -> None:
    """Append the missing bytes to `partial`; a broken connection is resumed up to ATTEMPTS times."""
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
                with closing(_read_beside(_stream_range(remote.url, have, remote.size - 1))) as chunks:
                    for chunk in chunks:
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
    """Write all of `chunk`; a raw write may be partial."""
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_beside(chunks: Iterator[bytes]) -> Generator[bytes]:
    """`chunks`, read on a thread of their own, and b"" whenever none has come for half a second.

    A reader that leaves does not wait for the thread, which ends with the next chunk or the client's timeout. Raises
    what `chunks` raises.
    """
    found: queue.Queue[bytes | Exception | None] = queue.Queue(1)
    has_left = threading.Event()

    def put(each: bytes | Exception | None) -> bool:
        while not has_left.is_set():
            with suppress(queue.Full):
                found.put(each, timeout=_STALL_S)
                return True
        return False

    def read() -> None:
        try:
            if all(map(put, chunks)):
                put(None)
        except Exception as error:  # noqa: BLE001 - the reader raises it
            put(error)

    threading.Thread(target=read, name="edgespec-download-bytes", daemon=True).start()
    try:
        while True:
            try:
                each = found.get(timeout=_STALL_S)
            except queue.Empty:
                each = b""
            if each is None:
                return
            if isinstance(each, Exception):
                raise each
            yield each
    finally:
        has_left.set()


def _stream_range(url: str, first: int, last: int) -> Iterator[bytes]:
    """Bytes `first` to `last`, in chunks; if the server ignores the range, the bytes before it are skipped."""
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
