"""API keys: who calls a server, and what a caller may do."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.engine.events import MemoryUse

ONLY_KEY = "api-key"
"""The name of the key of `--api-key`."""
_NAMESPACE = "key:"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    name        that of the caller's key; "" without a key
    may_manage  whether the caller may load, unload and download models, or may generate only
    remembers   whether the memory keeps the caller's texts and drafts from them
    """

    name: str = ""
    may_manage: bool = False
    remembers: bool = False

    @property
    def memory(self) -> MemoryUse | None:
        """What the caller's generations use of the memory: texts of its own key alone. None: nothing."""
        return MemoryUse(name_namespace(self.name)) if self.remembers else None


@dataclass(frozen=True, slots=True)
class Key:
    """What a server knows of a key: its caller and its hash."""

    caller: Caller
    digest: bytes


def name_namespace(name: str) -> str:
    """The namespace of a key in the memory, by the key's name; without a key it is the user's own."""
    return f"{_NAMESPACE}{name}" if name else ""


def read_namespace(namespace: str) -> str:
    """The name of the key with this namespace; "" for the user's own."""
    return namespace.removeprefix(_NAMESPACE)


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
    """The keys of a server."""

    def __init__(self, read: Callable[[], Sequence[Key]]) -> None:
        """`read` returns the keys that are valid at the time."""
        self._read = read

    def identify(self, key: str) -> Caller | None:
        """The caller with this key, found in constant time; None if there is none."""
        digest, found = hash_key(key), None
        for each in self._read():
            if hmac.compare_digest(digest, each.digest):
                found = each.caller
        return found
