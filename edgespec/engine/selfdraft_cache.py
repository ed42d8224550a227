"""Choices of self-drafts on disk, beside the copies that they need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.autopilot.store import Setting, calibration_folder, load_entry, read_entries, save_entry
from edgespec.backends.attached_draft import SelfDraftSpec, Unsupported, parse
from edgespec.errors import reading
from edgespec.files import lock_file, stat_files
from edgespec.formats.fingerprint import fingerprint_weights

_CHOICES = "choices.json"
_UNFINISHED = "unfinished.json"
_MAX_DEATHS = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """The best self-draft for a request such as 'auto' or 'layerskip', and whether it is expected to pay."""

    method: SelfDraftSpec
    pays: bool
    reason: str


class SelfDraftCache:
    """The cache of a target's self-drafts: low-bit copies and choices."""

    def __init__(self, target: Path, name: str) -> None:
        """Raises CacheError if the target's files cannot be read."""
        self.folder = cache_folder() / fingerprint_weights(target)
        self._name = name

    def look_up(self, setting: Setting, request: str) -> Choice | None:
        """The cached choice for `request` under `setting`; None without one."""
        return load_entry(self.folder / _CHOICES, "choice", {**setting, "asked": request}, _read_choice)

    def remember(self, setting: Setting, request: str, choice: Choice) -> None:
        """Store a choice. Errors are ignored: without it, the next run evaluates again."""
        found = {"method": str(choice.method), "pays": choice.pays, "reason": choice.reason, "model": self._name}
        entry = {"setting": {**setting, "asked": request}, "choice": found}
        save_entry(self.folder / _CHOICES, entry, "choice")

    @contextmanager
    def trying(self, setting: Setting, request: str) -> Iterator[None]:
        """Note on disk that a search is under way, until the block ends.

        Raises Unsupported if another process is searching, or if three processes have ended within such a block: a
        runtime may crash in a trial. Processes may also have been killed, so the first two do not count.
        """
        path, key = self.folder / _UNFINISHED, {**setting, "asked": request}
        deaths = load_entry(path, "unfinished", key, lambda found: int(found["times"])) or 0
        if deaths >= _MAX_DEATHS:
            raise Unsupported(
                f"the process has ended {deaths} times during the search for a self-draft.",
                hint="`edgespec draft rm` lets it be tried again; --draft layerskip:2 is used without a search.",
            )
        with ExitStack() as held:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock_file(self.folder / f"{_UNFINISHED}.lock", wait=False))
            except BlockingIOError as error:
                hint = "Wait for it, or use --draft layerskip:2, which needs no search."
                raise Unsupported("another process searches for a self-draft of this model.", hint=hint) from error
            except OSError:  # the folder cannot be written, so nothing is counted
                pass
            save_entry(path, {"setting": key, "unfinished": {"times": deaths + 1}}, "unfinished")
            try:
                yield
            finally:
                save_entry(path, {"setting": key, "unfinished": {"times": 0}}, "unfinished")


def _read_choice(found: dict[str, Any]) -> Choice | None:
    method = parse(found["method"])
    return Choice(method, bool(found["pays"]), str(found["reason"])) if method else None


@dataclass(frozen=True, slots=True)
class CachedSelfDraft:
    """The cached copies and choices of one model."""

    folder: Path
    model: str
    copies: tuple[Path, ...]
    choices: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(found.st_size for found in stat_files(self.copies).values())


def list_cached_drafts() -> list[CachedSelfDraft]:
    found = []
    for folder in sorted(cache_folder().glob("*")):
        entries = read_entries(folder / _CHOICES, "choice")
        choices = [
            f"{each['setting'].get('asked')}: {each['choice'].get('method')}, {each['choice'].get('reason')}"
            + ("" if each["choice"].get("pays") else "; it is not expected to pay")
            for each in entries
        ]
        for each in read_entries(folder / _UNFINISHED, "unfinished"):
            if (times := each["unfinished"].get("times")) and each["setting"].get("asked"):
                choices.append(f"{each['setting']['asked']}: its search was cut off {times} times")
        copies = tuple(sorted(folder.glob("*.gguf")))
        if copies or choices:
            name = str(entries[0]["choice"].get("model")) if entries else folder.name
            found.append(CachedSelfDraft(folder, name, copies, tuple(choices)))
    return found


def remove_cached_draft(cached: CachedSelfDraft) -> int:
    """Remove the copies and choices of a model; returns the bytes freed. Raises CacheError."""
    size = cached.size
    with reading(cached.folder, "cannot be removed"):
        shutil.rmtree(cached.folder)
    return size


def cache_folder() -> Path:
    return calibration_folder().with_name("drafts")
