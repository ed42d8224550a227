"""What the chat keeps between two starts: view options, models that were opened, and the prompts that were sent."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from edgespec.conversations.database import data_folder
from edgespec.errors import CacheError, EdgespecError
from edgespec.files import write_atomically

MAX_PROMPTS = 1000  # that are read
_MAX_PATHS = 20  # of models
_MAX_BYTES = 2**20  # of the prompts; a larger file is set aside for a new one
_HINT = "Free some space, or set EDGESPEC_DATA_DIR to another folder."


class Settings:
    """Named texts. Each has a file of its own, so that several programs change different ones without a lock."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` defaults to `settings` in the data folder; it may be missing."""
        self._folder = folder or data_folder() / "settings"
        self.notice: str | None = None  # about files that could not be read

    def read(self, name: str) -> str:
        """The text last written; empty where there is none, or where the file is damaged."""
        path = self._folder / name
        try:
            return path.read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, ValueError) as error:
            self.notice = f"The setting in {path} is ignored: {error}."
            return ""

    def write(self, name: str, text: str) -> None:
        """Raises CacheError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._folder / name, f"{text}\n")
        except OSError as error:
            raise CacheError(f"the setting {name} cannot be kept: {error.strerror}.", hint=_HINT) from error


def find_first_model() -> str | None:
    """What a chat opens where no model is named: EDGESPEC_MODEL, else the last model, else the registry's default.

    None where that is the embedded pair, with which nobody can talk.
    """
    from edgespec.registry.schema import EMBEDDED_ALIAS, load_registry

    is_named = bool(os.environ.get("EDGESPEC_MODEL"))
    if not is_named and (last := read_last_model()) is not None:
        return last
    default = load_registry().default
    return default if is_named or default != EMBEDDED_ALIAS else None


def add_path(paths: str, path: str) -> str:
    """The lines of the setting `paths`, the models that were opened by path, with another one first."""
    return "\n".join([path, *(line for line in paths.splitlines() if line != path)][:_MAX_PATHS])


def read_last_model() -> str | None:
    """The model that a chat has opened last, as `edgespec chat` takes it; None where it would have to be downloaded."""
    from edgespec.backends import prefers_mlx
    from edgespec.hub.hub import Hub
    from edgespec.registry.resolve import resolve_pair
    from edgespec.registry.schema import load_registry

    if name := Settings().read("model"):
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
        self.notice: str | None = None  # about lines that could not be read
        self.texts: list[str] = []
        earlier = self._path.with_suffix(".old.jsonl")
        with suppress(OSError):
            if self._path.stat().st_size > _MAX_BYTES:
                self._path.replace(earlier)
        n_damaged = 0
        for file in (earlier, self._path):
            for line in _read_lines(file):
                try:
                    text = json.loads(line)
                except ValueError:
                    text = None
                if isinstance(text, str):
                    self._remember(text)
                else:
                    n_damaged += 1
        del self.texts[:-MAX_PROMPTS]
        if n_damaged:
            self.notice = f"{n_damaged} damaged lines of {self._path} are ignored."

    def add(self, text: str) -> None:
        """Keep `text` unless it is the last one. Raises CacheError where it is kept for this start only."""
        if not self._remember(text):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, f"{json.dumps(text)}\n".encode())
            finally:
                os.close(file)
        except OSError as error:
            raise CacheError(f"{self._path} cannot be written: {error.strerror}.", hint=_HINT) from error

    def _remember(self, text: str) -> bool:
        """Whether `text` is new."""
        if self.texts and self.texts[-1] == text:
            return False
        self.texts.append(text)
        return True


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
