"""A file of API keys: TOML with a table for each, [NAME], sha256 = "64 hexadecimal digits", and perhaps manage = true
and memory = true.

It holds hashes only, so it need not be kept secret; but whoever can write it can let himself in.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.files import write_private
from edgespec.server.keys import ONLY_KEY, Caller, Key, hash_key, make_key

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # also a key of TOML without quotes
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FLAGS = ("manage", "memory")
_HINT = "`edgespec key add NAME` writes such entries."
_LOG = logging.getLogger("edgespec.server")


class KeyFile:
    """The keys of a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest for a file without keys, one that is damaged, or one that other users can write."""
        self._path = path
        self._stamp = _stamp(path)
        self._keys = read_keys(path)
        if not self._keys:
            raise InvalidRequest(f"{path} has no key.", hint=f"Make one: edgespec key add NAME --file {path}")

    def read(self) -> Sequence[Key]:
        """The keys. A file that cannot be read any more is reported in the log; the keys read before stay valid."""
        if (stamp := _stamp(self._path)) != self._stamp:
            self._stamp = stamp
            try:
                self._keys = read_keys(self._path)
            except InvalidRequest as error:
                _LOG.error("%s The keys read before stay valid.", error.message)
            else:
                _LOG.info("keys of %s: %s", self._path, ", ".join(each.caller.name for each in self._keys) or "none")
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
    _check_name(name)
    fields = table if isinstance(table, dict) else {}
    digest, flags = fields.get("sha256"), {flag: fields.get(flag, False) for flag in _FLAGS}
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidRequest(f"{path}: [{name}] has no sha256 of 64 hexadecimal digits.", hint=_HINT)
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidRequest(f"{path}: {flag} of [{name}] must be true or false.", hint=_HINT)
    if unknown := sorted(set(fields) - {"sha256", *_FLAGS}):
        raise InvalidRequest(f"{path}: [{name}] has an unknown field, '{unknown[0]}'.", hint=_HINT)
    return Key(Caller(name, may_manage=flags["manage"], remembers=flags["memory"]), bytes.fromhex(digest))


def _check_name(name: str) -> None:
    if name == ONLY_KEY:
        raise InvalidRequest(f"'{name}' is the name of the key of --api-key.", hint="Choose another name.")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"a key cannot have the name '{name[:100]}'.", hint="Use letters, digits, - and _, at most 64 of them."
        )


def add_key(path: Path, name: str, *, may_manage: bool = False, remembers: bool = False) -> str:
    """Append a new key to a file, which is made where there is none, for its owner only. The key is in no file.

    Raises InvalidRequest for a name that is taken or not allowed and for a damaged file, CacheError.
    """
    _check_name(name)
    keys = read_keys(path) if path.exists() else ()
    if name in {each.caller.name for each in keys}:
        raise InvalidRequest(
            f"{path} has a key '{name}' already.", hint=f"Choose another name, or first: edgespec key rm {name}"
        )
    key = make_key()
    flags = (f"{flag} = true\n" for flag, is_set in zip(_FLAGS, (may_manage, remembers), strict=True) if is_set)
    table = f'[{name}]\nsha256 = "{hash_key(key).hex()}"\n' + "".join(flags)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0) as file:
            gap = "\n" if file.seek(0, os.SEEK_END) else ""
            file.write(f"{gap}{table}".encode())
    except OSError as error:
        raise CacheError(f"cannot write {path}: {reason_of(error)}.", hint="Choose another --file.") from error
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove the table of a key; the rest of the file stays as it is. Raises InvalidRequest, CacheError."""
    before = read_keys(path)
    if name not in {each.caller.name for each in before}:
        names = ", ".join(each.caller.name for each in before) or "none"
        raise InvalidRequest(f"{path} has no key '{name}'.", hint=f"It has: {names}.")
    try:
        text = path.read_text(encoding="utf-8")
        rest = re.sub(rf"(?ms)^\[{re.escape(name)}\][^\n]*\n.*?(?=^\[|\Z)", "", text)
        if set(tomllib.loads(rest)) != {each.caller.name for each in before} - {name}:
            raise InvalidRequest(f"{path} has no line [{name}].", hint="Remove the entry by hand.")
        write_private(path.resolve(), rest)
    except OSError as error:
        raise CacheError(f"cannot write {path}: {reason_of(error)}.", hint="Check its permissions.") from error
