"""The files of a folder that are documents: text files that .gitignore does not exclude."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

from edgespec.errors import InvalidRequest

MAX_BYTES = 2**20
"""The size of a document at most; larger files are rarely written by hand."""

_PROBE = 8192  # bytes in which a zero byte shows that a file is not text, as git decides it
_IGNORE = ".gitignore"
_FOLDERS_OF_TOOLS = frozenset({".git", ".hg", ".svn"})


@dataclass(frozen=True, slots=True)
class Document:
    """A text file: its absolute path, which is its source in the memory, and its size in bytes."""

    path: Path
    size: int


def find_documents(paths: Iterable[Path], skipped: Counter[str]) -> Iterator[Document]:
    """The documents among `paths` and in the folders of them, each once, in an order that is always the same.

    `skipped` counts the files that are left out, by reason.
    Links in folders are not followed. A path that is named itself is taken even if .gitignore excludes it. Raises
    InvalidRequest for one that does not exist.
    """
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise InvalidRequest(f"there is no file or folder {path}.", hint="Check the spelling.")
        start = path.resolve()
        rules = _read_rules_above(start)
        if rules.exclude(start, is_folder=start.is_dir()):
            rules = _Rules()
        for file in _walk(start, rules, skipped) if start.is_dir() else [start]:
            if file not in seen:
                seen.add(file)
                if (document := _examine(file, skipped)) is not None:
                    yield document


def read_document(path: Path) -> str:
    """The text of a file; bytes that are not UTF-8 are replaced. Raises OSError."""
    return path.read_text(encoding="utf-8", errors="replace")


class _Rules:
    """The patterns of the .gitignore files from the top of a work tree down to a folder."""

    def __init__(self, levels: tuple[tuple[Path, GitIgnoreSpec], ...] = ()) -> None:
        self._levels = levels

    def enter(self, folder: Path) -> _Rules:
        """The rules inside `folder`."""
        try:
            lines = (folder / _IGNORE).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return self
        return _Rules((*self._levels, (folder, GitIgnoreSpec.from_lines(lines))))

    def exclude(self, path: Path, *, is_folder: bool) -> bool:
        """Tells whether `path` is ignored: the lowest .gitignore that has a pattern for it decides."""
        for folder, spec in reversed(self._levels):
            relative = PurePosixPath(path.relative_to(folder))
            found = spec.check_file(f"{relative}/" if is_folder else str(relative)).include
            if found is not None:
                return found
        return False


def _read_rules_above(start: Path) -> _Rules:
    """The rules of the folders above `start`, up to that of its work tree; none if it is in no work tree."""
    above = [start, *start.parents]
    top = next((i for i, folder in enumerate(above) if (folder / ".git").exists()), 0)
    rules = _Rules()
    for folder in reversed(above[1 : top + 1]):
        rules = rules.enter(folder)
    return rules


def _walk(top: Path, above: _Rules, skipped: Counter[str]) -> Iterator[Path]:
    """The files below a folder that no rule excludes; those of a folder before those of the folders in it."""
    waiting = [(top, above)]
    while waiting:
        folder, rules = waiting.pop()
        rules = rules.enter(folder)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            skipped["unreadable"] += 1
            continue
        inner = []
        for entry in entries:
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name in _FOLDERS_OF_TOOLS:
                continue
            if rules.exclude(path, is_folder=is_folder):
                skipped["ignored"] += 1
            elif is_folder:
                inner.append((path, rules))
            elif entry.is_symlink():
                skipped["links"] += 1
            elif entry.is_file():
                yield path
        waiting += reversed(inner)


def _examine(path: Path, skipped: Counter[str]) -> Document | None:
    """The document at `path`; None for what is no text of a usual size."""
    try:
        size = path.stat().st_size
        if not size:
            reason = "empty"
        elif size > MAX_BYTES:
            reason = f"larger than {MAX_BYTES // 2**20} MiB"
        else:
            with path.open("rb") as file:
                if b"\0" not in file.read(_PROBE):
                    return Document(path, size)
            reason = "not text"
    except OSError:
        reason = "unreadable"
    skipped[reason] += 1
    return None
