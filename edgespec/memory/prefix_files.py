"""The caches of texts, in files that outlive the process: a conversation that goes on later is not read again."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.files import remove_unfinished, replace_file, stat_files

FOLDER = "prefixes"
"""The folder of these files inside the memory's folder."""

LIMIT_BYTES = 4 * 2**30
"""The most bytes that all files take together."""

FILE_BYTES = LIMIT_BYTES // 2
"""The most bytes of one file, which is in memory while it is written or read."""

LEAST_TOKENS = 256
"""The fewest tokens of a text whose cache is worth a file."""

_SUFFIX = ".prefix"
_MAGIC = b"EDGEPFX1"
_HEAD = struct.Struct("<8sQQ32s")  # magic, tokens, bytes of the cache, BLAKE2b of tokens and cache
_FREE_SHARE = 0.1  # share of the disk that stays free


Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]
_NOTHING: Tokens = np.empty(0, "<i4")


class SavedText(NamedTuple):
    """A file, how many tokens its text and a prompt begin with, and whether these are the whole text."""

    path: Path
    common: int
    is_whole: bool


class PrefixFiles:
    """The files of one model under the same settings; those of all models have one limit.

    Only the user can read them. A file appears whole or not at all, and a damaged one is removed when it is read. If
    a file cannot be written, the text is read again later.
    """

    def __init__(self, folder: Path, key: str, limit_bytes: int = LIMIT_BYTES) -> None:
        """`folder` is that of the memory. `key` stands for all that a cache depends on, apart from its tokens."""
        self._root = folder / FOLDER
        self._key = key
        self._limit_bytes = limit_bytes
        self._texts: dict[Path, tuple[int, Tokens]] = {}  # by path, with the time of the file

    def find(self, namespace: str, prompt: Sequence[int]) -> SavedText | None:
        """The file whose text has the longest common beginning with `prompt`, of `LEAST_TOKENS` at least."""
        if len(prompt) < LEAST_TOKENS:
            return None
        best: SavedText | None = None
        wanted = np.asarray(prompt, "<i4")
        place = self._place(namespace)
        listed = self._list(place)
        self._texts = {path: text for path, text in self._texts.items() if path.parent != place or path in listed}
        for path in listed:
            tokens = self._read_tokens(path)
            common = count_common(tokens, wanted)
            if common >= LEAST_TOKENS and (best is None or common > best.common):
                best = SavedText(path, common, common == len(tokens))
        return best

    def read(self, path: Path) -> tuple[list[int], memoryview] | None:
        """(the tokens of a text, its cache, which is writable); None if the file is gone or damaged."""
        try:
            with path.open("rb") as file:
                data = bytearray(path.stat().st_size)
                file.readinto(data)
            magic, n_tokens, n_bytes, digest = _HEAD.unpack_from(data)
            body = memoryview(data)[_HEAD.size :]
            if magic != _MAGIC or len(body) != 4 * n_tokens + n_bytes or _digest(body) != digest:
                raise ValueError("the file is damaged")
            os.utime(path)  # it was of use
        except (OSError, ValueError, struct.error):
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        return np.frombuffer(body[: 4 * n_tokens], "<i4").tolist(), body[4 * n_tokens :]

    def write(self, namespace: str, tokens: Sequence[int], cache: bytes | memoryview) -> Path | None:
        """Keep the cache of a text, in place of those that have little more than a beginning of it.

        The files that were of no use for longest make room. Returns the file; None if it could not be written.
        """
        place, text = self._place(namespace), np.asarray(tokens, "<i4")
        parts = text.tobytes(), cache
        with suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(_HEAD.size + sum(map(len, parts))):
                return None
            name = hashlib.blake2b(text.tobytes(), digest_size=12).hexdigest() + _SUFFIX
            with replace_file(place / name, 0o600) as partial, partial.open("wb") as file:
                file.write(_HEAD.pack(_MAGIC, len(text), len(cache), _digest(*parts)))
                file.writelines(parts)
            for path in self._list(place):
                known = self._read_tokens(path)
                common = count_common(known, text)
                if path.name != name and len(known) - common <= max(LEAST_TOKENS, common // 10):
                    path.unlink(missing_ok=True)
            return place / name
        return None

    def _place(self, namespace: str) -> Path:
        return self._root / hashlib.blake2b(f"{self._key}\n{namespace}".encode(), digest_size=12).hexdigest()

    def _list(self, place: Path) -> list[Path]:
        with suppress(OSError):
            return sorted(place.glob(f"*{_SUFFIX}"))
        return []

    def _read_tokens(self, path: Path) -> Tokens:
        """The tokens of a file's text, which are not checked."""
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            return _NOTHING
        if (known := self._texts.get(path)) is None or known[0] != changed:
            known = self._texts[path] = changed, _read_tokens(path)
        return known[1]

    def _make_room(self, n_bytes: int) -> bool:
        """Remove files until `n_bytes` more are within the limit; False if they cannot be."""
        remove_unfinished(self._root.glob(f"*/.*{_SUFFIX}.*"))
        if n_bytes > self._limit_bytes:
            return False
        sizes = stat_files(self._root.rglob(f"*{_SUFFIX}"))
        total = sum(each.st_size for each in sizes.values())
        disk = shutil.disk_usage(self._root)
        excess = max(total + n_bytes - self._limit_bytes, int(_FREE_SHARE * disk.total) - (disk.free - n_bytes))
        if excess > total:
            return False
        for path in sorted(sizes, key=lambda each: sizes[each].st_mtime):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= sizes[path].st_size
        return True


def measure_prefixes(folder: Path) -> int:
    """Bytes of the caches of all texts; `folder` is that of the memory."""
    return sum(each.st_size for each in stat_files((folder / FOLDER).rglob(f"*{_SUFFIX}")).values())


def remove_prefixes(folder: Path) -> None:
    """Remove the caches of all texts; `folder` is that of the memory."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def count_common(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    n = min(len(one), len(other))
    differences = np.flatnonzero(one[:n] != other[:n])
    return int(differences[0]) if len(differences) else n


def _read_tokens(path: Path) -> Tokens:
    """The tokens of a file's text, which are not checked; none of a file that cannot be read."""
    try:
        with path.open("rb") as file:
            magic, n_tokens, n_bytes, _ = _HEAD.unpack(file.read(_HEAD.size))
            if magic != _MAGIC or path.stat().st_size != _HEAD.size + 4 * n_tokens + n_bytes:
                return _NOTHING
            return np.frombuffer(file.read(4 * n_tokens), "<i4")
    except (OSError, struct.error):
        return _NOTHING


def _digest(*parts: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(digest_size=32)
    for part in parts:
        found.update(part)
    return found.digest()
