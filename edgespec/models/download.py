"""Downloads of single files from the hub into the shared Hugging Face cache, and reads of a part of one.

The client's own download keeps nothing when it is interrupted. Therefore the bytes are fetched here, with the client's
session and credentials, into `blobs/<etag>.edgespec.incomplete`, where the next attempt goes on.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

from edgespec.cancel import check_cancelled
from edgespec.errors import CacheError, HubError, InvalidModelFile
from edgespec.models.file_selection import RemoteFile
from edgespec.models.hub_errors import FREE_SPACE
from edgespec.progress import report_download
from edgespec.units import gib

CHUNK_BYTES = 2**20
SPARE_BYTES = 64 * 2**20
ATTEMPTS = 5
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0  # that a server may ask for
_BUSY = (429, 502, 503, 504)  # statuses after which a server may be asked again
_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # a git hash, or sha256


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


def download_file(remote: RemoteFile, url: str, blobs: Path, lock: Path) -> None:
    """Download a file to its place in `blobs`, resuming an earlier attempt.

    It gets there only with the hub's size and hash. `lock` is the client's lock file for it. Raises InvalidModelFile,
    HubError for a file without a hash, the errors of the client and the disk, Cancelled.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    if remote.etag is None or not _HASH.fullmatch(remote.etag):
        raise HubError(f"The hub does not state the hash of {remote.path}.", hint="Check HF_ENDPOINT.")
    blob, partial = blobs / remote.etag, _partial_path(remote, blobs)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not _is_complete(remote, blobs):
            _download(remote, url, partial)
            if difference := checksum_error(partial, remote.etag, remote.size):
                partial.unlink()
                raise damaged_error(remote.path, difference)
            os.replace(partial, blob)


def damaged_error(path: str, difference: str) -> InvalidModelFile:
    return InvalidModelFile(
        f"{path} is damaged: {difference}; the bad copy was removed.", hint="Pull it again with `edgespec pull`."
    )


def check_disk_space(remote: RemoteFile, blobs: Path) -> None:
    """Raise CacheError if the disk of `blobs`, which is created, has no space for the missing bytes of a file."""
    blobs.mkdir(parents=True, exist_ok=True)
    if _is_complete(remote, blobs):
        return
    partial, free = _partial_path(remote, blobs), shutil.disk_usage(blobs).free
    missing = remote.size - (partial.stat().st_size if partial.exists() else 0)
    if missing > 0 and missing + SPARE_BYTES > free:
        raise CacheError(
            f"{remote.path} needs {gib(missing)} more and the disk of {blobs} has {gib(free)} free.", hint=FREE_SPACE
        )


def _is_complete(remote: RemoteFile, blobs: Path) -> bool:
    blob = blobs / str(remote.etag)
    return blob.is_file() and blob.stat().st_size == remote.size


def _partial_path(remote: RemoteFile, blobs: Path) -> Path:
    return blobs / f"{remote.etag}.edgespec.incomplete"


def checksum_error(path: Path, etag: str, size: int) -> str | None:
    """How the file differs from the hub's size and hash, or None. Only sha256 and git hashes are compared."""
    found = path.stat().st_size
    if found != size:
        return f"it has {found:,} bytes, the hub announced {size:,}"
    if not _HASH.fullmatch(etag):
        return None
    start = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if len(etag) == 40 else hashlib.sha256()
    with open(path, "rb") as file:
        actual = hashlib.file_digest(file, lambda: start).hexdigest()
    return None if actual == etag else f"its hash is {actual[:12]}..., the hub announced {etag[:12]}..."


def _download(remote: RemoteFile, url: str, partial: Path) -> None:
    """Append the missing bytes to `partial`.

    After a broken connection, or if the server is busy, it tries again. After ATTEMPTS failures since the last byte
    arrived, it raises the client's error.
    """
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    failures = 0
    with open(partial, "ab") as file:
        while (have := file.tell()) < remote.size:
            _report(remote, have)
            try:
                for chunk in _stream_range(url, have, remote.size - 1):
                    file.write(chunk)
                    _report(remote, file.tell())
                    if file.tell() >= remote.size:
                        return
                raise httpx.ReadError("the server sends no more bytes")
            except (httpx.TransportError, HfHubHTTPError) as error:
                failures = failures + 1 if file.tell() == have else 1
                answer = getattr(error, "response", None)
                if failures >= ATTEMPTS or (answer is not None and answer.status_code not in _BUSY):
                    raise
                left_s = _PAUSE_S if answer is None else _read_pause(answer.headers.get("Retry-After", ""))
                while left_s > 0:
                    _report(remote, file.tell())
                    time.sleep(min(left_s, _PAUSE_S))
                    left_s -= _PAUSE_S


def _report(remote: RemoteFile, done: int) -> None:
    check_cancelled()
    report_download(remote.path, done, remote.size)


def _read_pause(stated: str) -> float:
    """The seconds of a Retry-After, which is a number or a date, at most a minute; a second without one."""
    try:
        seconds = float(stated) if stated[:1].isdigit() else parsedate_to_datetime(stated).timestamp() - time.time()
    except ValueError:
        return _PAUSE_S
    return min(max(seconds, 0.0), _LONGEST_PAUSE_S)


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
            if kept := chunk[skip:]:
                yield kept
            skip = max(0, skip - len(chunk))
