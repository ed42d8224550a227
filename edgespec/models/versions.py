"""Drafts that were adapted to their user: versions of the draft of a target, of which at most one is used.

A folder holds one folder for each pair of a target and its base draft, named by the fingerprints of both. In it lie a
folder for each version, with its card and its draft, and the file `active` with the number of the version in use.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import time
from typing import Any

from edgespec.errors import InvalidModelFile, InvalidRequest, reading
from edgespec.files import lock_file, remove_path, write_private
from edgespec.formats.fingerprint import fingerprint_weights

BASE = 0
"""The number that stands for the base draft."""

NO_BASE = "none"
"""What a card has in place of a base draft: the draft was made for its target on this machine."""

KEPT = 5
"""Versions that are kept, the newest ones. Beside them stays the one that was in use before the newest."""

RUN = "training"
"""The folder of a training that is not complete, inside of a pair's folder. Other kinds of trainings append to the
name.
"""

OWN_TEXTS = "texts.jsonl"
"""The file of the texts that a target has written to train a new head, in the folder of that head."""

FIRST = "first"
"""The first head of a target, a file or folder beside these texts, as long as it gains too little to be a version."""

_CONSENT = "may-train"
_ACTIVE, _LOCK, _PARTIAL = "active", "lock", ".partial"  # of a pair
_CARD, _FOLDER, _FILE = "card.json", "draft", "draft.gguf"  # of a version
_using = partial(reading, failure="cannot be read or written", hint="Check its permissions and the space on the disk.")
_HINT = "Choose another version with `edgespec adapt use`; 0 is the draft before any training."


@dataclass(frozen=True, slots=True)
class Gain:
    """Expected tokens of a round on texts that were held out.

    low, high        95% interval of `after - before`
    n_conversations  that were held out
    """

    before: float
    after: float
    low: float
    high: float
    n_conversations: int

    @property
    def is_better(self) -> bool:
        """Tells whether the draft has gained, beyond chance."""
        return self.low > 0


@dataclass(frozen=True, slots=True)
class Card:
    """What is known of a version.

    method               how the draft drafts, such as 'model' or 'eagle3'
    base, target         what the user calls the draft that it was made from, and its target
    n_tokens             of the texts that it was trained on
    minutes              of training
    options              of the training, as JSON has them
    version, created_s   number from 1 on, and seconds since the epoch; set when it is added
    fingerprint          of its weights; set when it is added
    """

    method: str
    base: str
    target: str
    n_tokens: int
    gain: Gain
    minutes: float
    options: Mapping[str, Any] = field(default_factory=dict)
    version: int = BASE
    created_s: float = 0.0
    fingerprint: str = ""

    @property
    def date(self) -> str:
        """The day on which it was added, such as 2026-11-23."""
        return datetime.fromtimestamp(self.created_s).date().isoformat()


@dataclass(frozen=True, slots=True)
class AdaptedDraft:
    """A version that can be used: a GGUF file or MLX folder at `path`."""

    card: Card
    path: Path


class AdaptedDrafts:
    """The adapted drafts in a folder, which may be missing. Only its user can read it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pair(self, target: Path, draft: Path) -> AdaptedPair:
        """The versions of the base draft at `draft` for `target`, both weights files or folders. Raises CacheError."""
        return AdaptedPair(self.folder / f"{fingerprint_weights(target)}-{fingerprint_weights(draft)}")

    def new_head(self, target: Path, backend: str) -> AdaptedPair:
        """The versions of the head that was trained from nothing for `target` on a runtime. Raises CacheError."""
        return AdaptedPair(self.folder / f"{fingerprint_weights(target)}-eagle3-{backend}")

    def pairs(self) -> list[AdaptedPair]:
        """All pairs that have versions. Raises CacheError."""
        with _using(self.folder):
            folders = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        return [pair for pair in map(AdaptedPair, folders) if pair.versions()]


class AdaptedPair:
    """The versions of a base draft for a target. Every method raises CacheError.

    Several processes may use it: each sees a version whole or not at all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def versions(self) -> dict[int, Card | None]:
        """The cards by version, in rising order; None for one that is damaged, or in use and missing."""
        cards: dict[int, Card | None] = {}
        numbers = set(self._list())
        with suppress(InvalidModelFile):
            numbers |= {self.active_number()} - {BASE}
        for version in sorted(numbers):
            try:
                cards[version] = self.read(version).card
            except InvalidModelFile:
                cards[version] = None
        return cards

    def add(self, card: Card, save: Callable[[Path], None]) -> Card:
        """Add a version and use it; returns its card with the fields that are set here. Old versions are removed.

        `save` writes the draft to the path that it is given, which it creates as a file or a folder. If it fails or
        the process dies, all is as before.
        """
        with _using(self.folder), self._lock():
            partial = self.folder / _PARTIAL
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir(mode=0o700)
            try:
                draft = partial / _FOLDER
                save(draft)
                if draft.is_file():
                    draft = draft.rename(partial / _FILE)
                version = max(self._list(), default=BASE) + 1
                card = replace(card, version=version, created_s=time(), fingerprint=fingerprint_weights(draft))
                (partial / _CARD).write_text(json.dumps(asdict(card)), encoding="utf-8")
                for path in partial.rglob("*"):
                    path.chmod(0o700 if path.is_dir() else 0o600)
                partial.rename(self.folder / str(version))
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            before = self._read_active()
            self._write_active(version)
            for old in self._list()[:-KEPT]:
                if str(old) != before:
                    shutil.rmtree(self.folder / str(old), ignore_errors=True)
        return card

    def active_number(self) -> int:
        """The number of the version in use; BASE for none. Raises InvalidModelFile if that is damaged."""
        with _using(self.folder):
            text = self._read_active()
        if not text.isascii() or not text.isdigit():
            raise InvalidModelFile("it is not known which version of the draft is in use.", hint=_HINT)
        return int(text)

    def active(self) -> AdaptedDraft | None:
        """The version in use; None for the base draft. Raises InvalidModelFile if it is damaged or missing."""
        number = self.active_number()
        return self.read(number) if number != BASE else None

    def read(self, version: int) -> AdaptedDraft:
        """A version. Raises InvalidModelFile if it is damaged or missing."""
        folder = self.folder / str(version)
        path = next((folder / name for name in (_FOLDER, _FILE) if (folder / name).exists()), None)
        if path is None:
            raise InvalidModelFile(f"the files of version {version} of the draft are missing.", hint=_HINT)
        try:
            values = json.loads((folder / _CARD).read_bytes())
            known = {each.name: values[each.name] for each in fields(Card) if each.name in values}
            card = Card(**{**known, "gain": Gain(**values["gain"])})
            _ = card.date, card.gain.is_better  # raise for values that no card has
        except (OSError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidModelFile(f"the card of version {version} of the draft is damaged.", hint=_HINT) from error
        if card.version != version or card.fingerprint != fingerprint_weights(path):
            raise InvalidModelFile(f"the files of version {version} of the draft are damaged.", hint=_HINT)
        return AdaptedDraft(card, path)

    def use(self, version: int) -> None:
        """Use a version from now on, or BASE. Raises InvalidRequest for one that is not there, InvalidModelFile."""
        if version != BASE:
            if version not in (known := self._list()):
                there = f"there are {', '.join(map(str, known))}" if known else "there are none"
                raise InvalidRequest(f"there is no version {version} of this draft.", hint=f"Versions: {there}.")
            self.read(version)
        if self.folder.is_dir():
            with _using(self.folder), self._lock():
                self._write_active(version)

    def _list(self) -> list[int]:
        """The numbers of the versions, in rising order."""
        with _using(self.folder):
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def _read_active(self) -> str:
        path = self.folder / _ACTIVE
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else str(BASE)

    def _write_active(self, version: int) -> None:
        write_private(self.folder / _ACTIVE, f"{version}\n")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one process write."""
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with lock_file(self.folder / _LOCK, wait=True):
            yield


def may_train(folder: Path) -> bool:
    """Tells whether the user has allowed to train on their texts; `folder` is that of the adapted drafts."""
    return (folder / _CONSENT).exists()


def allow_training(folder: Path) -> None:
    """Remember that the user allows it. Raises CacheError."""
    with _using(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / _CONSENT).touch(mode=0o600)


def forbid_training(folder: Path) -> None:
    """Ask again before the next training. Raises CacheError."""
    with _using(folder):
        (folder / _CONSENT).unlink(missing_ok=True)


def list_runs(folder: Path, *, own_texts: bool) -> list[Path]:
    """What trainings that are not complete have kept: the texts that they read, and what was learned from them.

    A new head learns from texts that its target has written for it. They and its training are listed with `own_texts`
    only.
    """
    runs = [run for run in folder.glob(f"*/{RUN}*") if own_texts or not (run.parent / OWN_TEXTS).exists()]
    names = (OWN_TEXTS, f"{FIRST}*") if own_texts else ()
    return [*runs, *(path for name in names for path in folder.glob(f"*/{name}"))]


def clear_runs(folder: Path, *, own_texts: bool) -> None:
    """Remove what `list_runs` lists. Raises CacheError."""
    with _using(folder):
        for path in list_runs(folder, own_texts=own_texts):
            shutil.rmtree(path, ignore_errors=True)  # a training may write in it at this moment
            remove_path(path)
