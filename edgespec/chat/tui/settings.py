"""What the chat keeps between two starts: view options, models that were opened, and the prompts that were sent."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from edgespec.errors import CacheError, EdgespecError
from edgespec.files import write_atomically
from edgespec.folders import data_folder

MAX_PROMPTS = 1000  # that are read
_MAX_BYTES = 2**20  # of the prompts; a larger file is set aside for a new one
_HINT = "Free some space, or set EDGESPEC_DATA_DIR to another folder."


def read_setting(name: str) -> str:
    """The text last written; empty if there is none, or if the file cannot be read.

    Each setting has a file of its own, so that several programs change different ones without a lock.
    """
    with suppress(OSError, ValueError):
        return (data_folder() / "settings" / name).read_text(encoding="utf-8").strip()
    return ""


def write_setting(name: str, text: str) -> None:
    """Replace the text. Raises CacheError."""
    try:
        folder = data_folder() / "settings"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(folder / name, f"{text}\n")
    except OSError as error:
        raise CacheError(f"the setting {name} cannot be kept: {error.strerror}.", hint=_HINT) from error


def find_first_model() -> str | None:
    """What a chat opens if no model is named: EDGESPEC_MODEL, else the last model, else the registry's default.

    None if that is the embedded pair, with which nobody can talk.
    """
    from edgespec.models.registry import EMBEDDED_ALIAS, load_registry

    is_named = bool(os.environ.get("EDGESPEC_MODEL"))
    if not is_named and (last := read_last_model()) is not None:
        return last
    default = load_registry().default
    return default if is_named or default != EMBEDDED_ALIAS else None


def read_last_model() -> str | None:
    """The model that a chat has opened last, as `edgespec chat` takes it; None if it would have to be downloaded."""
    from edgespec.backends import prefers_mlx
    from edgespec.models.hub import Hub
    from edgespec.models.registry import load_registry
    from edgespec.models.resolve import resolve_pair

    if name := read_setting("model"):
        with suppress(EdgespecError):
            hub = replace(Hub.from_environment(), offline=True)
            resolve_pair(name, "mlx" if prefers_mlx() else "llamacpp", load_registry(), hub)
            return name
    return None


class PromptHistory:
    """The prompts of all chats, the oldest first. Every prompt is one appended line, so that no program loses
    another's.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path` defaults to prompts.jsonl in the data folder; it may be missing."""
        self._path = path or data_folder() / "prompts.jsonl"
        self.texts: list[str] = []
        earlier = self._path.with_suffix(".old.jsonl")
        with suppress(OSError):
            if self._path.stat().st_size > _MAX_BYTES:
                self._path.replace(earlier)
        for file in (earlier, self._path):
            with suppress(OSError):
                for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                    with suppress(ValueError, RecursionError):  # a line that another program has not finished
                        self._remember(str(json.loads(line)))
        del self.texts[:-MAX_PROMPTS]

    def add(self, text: str) -> None:
        """Keep `text` unless it is the last one. Raises CacheError if it is kept for this start only."""
        if not self._remember(text):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
            with self._path.open("ab", buffering=0) as file:
                file.write(f"{json.dumps(text)}\n".encode())
        except OSError as error:
            raise CacheError(f"{self._path} cannot be written: {error.strerror}.", hint=_HINT) from error

    def _remember(self, text: str) -> bool:
        """Whether `text` is new."""
        is_new = self.texts[-1:] != [text]
        if is_new:
            self.texts.append(text)
        return is_new
