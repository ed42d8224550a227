"""API keys: who calls a server, and a file of keys that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import InvalidRequest, reason_of

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # also a key of TOML without quotes
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HINT = "`edgespec key add NAME` writes such entries."
_LOG = logging.getLogger("edgespec.server")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    name        that of the caller's key; "" without a key
    may_manage  whether the caller may load, unload and download models, or may generate only
    """

    name: str = ""
    may_manage: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """What a server knows of a key: its caller and its hash."""

    caller: Caller
    digest: bytes


def make_key() -> str:
    """A random key of 256 bits. Its beginning is the one that clients and scanners for secrets expect."""
    return f"sk-edgespec-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> bytes:
    """SHA-256 of a key.

    Slow hashes with salt protect passwords, which can be guessed. A random key of 256 bits cannot be, so a slow hash
    would add no safety, and its time to every request.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Keys:
    """The keys of a server: fixed ones, and those of a file."""

    def __init__(self, fixed: Sequence[Key] = (), file: KeyFile | None = None) -> None:
        self._fixed = tuple(fixed)
        self._file = file

    def identify(self, key: str) -> Caller | None:
        """The caller with this key, found in constant time; None if there is none."""
        digest, found = hash_key(key), None
        for each in (*self._fixed, *(self._file.read() if self._file is not None else ())):
            if hmac.compare_digest(digest, each.digest):
                found = each.caller
        return found


class KeyFile:
    """A TOML file with a table for each key: [NAME], sha256 = "64 hexadecimal digits", and perhaps manage = true."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest for a file without keys, one that is damaged, or one that other users can write."""
        self._path = path
        self._keys = read_keys(path)
        self._stamp = _stamp(path)
        if not self._keys:
            raise InvalidRequest(f"{path} has no key.", hint=f"Make one: edgespec key add NAME --file {path}")

    def read(self) -> Sequence[Key]:
        """The keys. A file that has become unreadable is reported in the log; the keys read before stay valid."""
        if (stamp := _stamp(self._path)) != self._stamp:
            self._stamp = stamp
            try:
                self._keys = read_keys(self._path)
            except InvalidRequest as error:
                _LOG.error("%s The keys read before stay valid.", error.message)
            else:
                _LOG.info("keys read again from %s: %s", self._path, len(self._keys))
        return self._keys


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced; () if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises InvalidRequest."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            tables = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {reason_of(error)}.", hint=_HINT) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequest(f"other users can write {path}.", hint=f"Run: chmod 600 {path}")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        _LOG.warning("other users can read %s; `chmod 600` ends that", path)
    return tuple(_parse_key(path, name, table) for name, table in tables.items())


def _parse_key(path: Path, name: str, table: Any) -> Key:
    check_name(name)
    fields = table if isinstance(table, dict) else {}
    digest, may_manage = fields.get("sha256"), fields.get("manage", False)
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidRequest(f"{path}: [{name}] has no sha256 of 64 hexadecimal digits.", hint=_HINT)
    if not isinstance(may_manage, bool):
        raise InvalidRequest(f"{path}: manage of [{name}] must be true or false.", hint=_HINT)
    if unknown := sorted(set(fields) - {"sha256", "manage"}):
        raise InvalidRequest(f"{path}: [{name}] has an unknown field, '{unknown[0]}'.", hint=_HINT)
    return Key(Caller(name, may_manage), bytes.fromhex(digest))


def check_name(name: str) -> None:
    """Raises InvalidRequest for a name that a key cannot have."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"a key cannot have the name '{name[:100]}'.", hint="Use letters, digits, - and _, at most 64 of them."
        )
