"""What the hub's stand-in knows: its folders, the faults that tests switch on, and the requests it has had."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGE = (".gguf", ".safetensors")


@dataclass(slots=True)
class Request:
    """One request, logged before its answer goes out; `sent` counts the body's bytes handed to the connection."""

    method: str
    path: str
    range: str | None
    status: int
    sent: int
    authorization: str | None


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong for one path, or for the whole repository where the path is ''.

    Kinds: `status` (answer with `code`, `error_code`, `message`, `retry_after`), `corrupt` (the byte at `at` is
    flipped), `stall` (stop sending after `at` bytes of the file and hold the connection until released), `drop` (close
    it there), `no-range` (ignore Range), `oversize` (claim `at` bytes in listing and headers), `garbage` (answer with a
    web page), `silent` (take the request and never answer), `redirect` (send the client to another host name for the
    content, as the hub does with large files).
    """

    kind: str
    at: int = 0
    code: int = 500
    error_code: str | None = None
    message: str | None = None
    retry_after: str | None = None


@dataclass(slots=True)
class State:
    root: Path
    token: str | None = None
    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: list[Request] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)

    def folder(self, repo: str, revision: str) -> Path | None:
        base = self.root / repo
        if not base.is_dir():
            return None
        for place in [base, *self.root.glob(f"{repo}@*")]:
            name = "main" if place == base else place.name.split("@", 1)[1]
            if revision in (name, commit_of(repo, name)):
                return place
        return None

    def list_repos(self, search: str, tags: list[str], limit: int) -> list[dict[str, Any]]:
        """Repositories as the hub lists them: those whose name has `search` and that have all `tags`, by downloads.

        What `cards` says of a repository, its tags and downloads, is added; the format of its files is a tag.
        """
        found: list[dict[str, Any]] = []
        for folder in sorted(self.root.glob("*/*")):
            repo = folder.relative_to(self.root).as_posix()
            kind = "gguf" if any(folder.rglob("*.gguf")) else "mlx"
            card: dict[str, Any] = {"downloads": 0, "tags": [], **self.cards.get(repo, {})}
            card["tags"] = [kind, *card["tags"]]
            if "@" not in repo and search.lower() in repo.lower() and set(tags) <= set(card["tags"]):
                found.append({"id": repo, "modelId": repo, "sha": commit_of(repo), **card})
        return sorted(found, key=lambda each: -int(each["downloads"]))[:limit]

    def fault(self, repo: str, path: str) -> Fault | None:
        return self.faults.get((repo, path)) or self.faults.get((repo, ""))


def commit_of(repo: str, revision: str = "main") -> str:
    """The commit that the server gives for a branch or tag."""
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


def etag_of(path: Path) -> str:
    """The etag that the server gives a file: sha256 for weights, the git blob hash for the rest."""
    data = path.read_bytes()
    if path.suffix in LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
