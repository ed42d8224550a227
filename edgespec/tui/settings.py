"""What the chat keeps between two starts: view options, models that were opened, and the prompts that were sent."""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.conversations.database import data_folder
from edgespec.drafters import drafter_specs
from edgespec.errors import CacheError, EdgespecError
from edgespec.files import write_atomically
from edgespec.text.stream import Piece
from edgespec.tui.blocks import MUTED, Paint, Run

MAX_PROMPTS = 1000  # that are read
_MAX_PATHS = 20  # of models
_MAX_BYTES = 2**20  # of the prompts; a larger file is set aside for a new one
_HINT = "Free some space, or set EDGESPEC_DATA_DIR to another folder."


# Each setting is a named text in a file of its own, so that several programs change different ones without a lock.


def read_setting(name: str) -> str:
    """The text last written; empty where there is none, or where the file cannot be read."""
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
            for line in _read_lines(file):
                with suppress(ValueError):  # a line that another program has not finished
                    self._remember(str(json.loads(line)))
        del self.texts[:-MAX_PROMPTS]

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


# Styles for text by the drafter that proposed each token.


Span = tuple[int, str, int]
"""(characters, origin as in Piece, tokens) of a run of tokens with one origin."""

# Of the registry's drafters, in its order. Underline and weight carry the same without color.
_COLORS = ("$text-primary", "$text-success", "$text-error", "$text-secondary", "$text-accent")
_SEVERAL = "$text-warning"  # drafters that proposed the same token
_MIN_LONG_RUN = 4  # tokens
_MAX_MARKUP = 80  # characters that are not shown between two that are
_MAX_MARKS = 4  # before a space, which may also have been added


def extend_spans(spans: list[Span], pieces: Sequence[Piece]) -> None:
    """Append `pieces`, and merge neighbors of the same origin."""
    for piece in pieces:
        if spans and spans[-1][1] == piece.origin:
            length, _, tokens = spans[-1]
            spans[-1] = (length + len(piece.text), piece.origin, tokens + 1)
        else:
            spans.append((len(piece.text), piece.origin, 1))


@dataclass(frozen=True, slots=True)
class Origins:
    """Who proposed the characters of a part of a text: `styles` are (start, end, style) of the drafted ones."""

    source: str
    styles: tuple[tuple[int, int, str], ...]

    @classmethod
    def of(cls, text: str, spans: Sequence[Span], ends: Sequence[int], start: int, end: int) -> Origins:
        """The origins of the characters `start` to `end`; `ends` are where the spans end. They may not reach `end`."""
        styles: list[tuple[int, int, str]] = []
        for i in range(bisect_right(ends, start), bisect_left(ends, end) + 1):
            if i < len(spans) and (style := _select_style(*spans[i][1:])):
                begin = max(ends[i] - spans[i][0], start)
                styles.append((begin - start, min(ends[i], end) - start, style))
        return cls(text[start:end], tuple(styles))

    def paint(self) -> Paint:
        """Adds the styles to runs that show the source without its markup."""
        by_character = [""] * len(self.source)
        for start, end, style in self.styles:
            by_character[start:end] = [style] * (end - start)
        at = 0
        is_indent = True  # whether only spaces stand before the next character in its line

        def paint(runs: Sequence[Run]) -> list[Run]:
            nonlocal at, is_indent
            painted: list[Run] = []
            for text, styles in runs:
                for character in text:
                    limit = _MAX_MARKUP if not character.isspace() else _MAX_MARKS
                    found = self.source.find(character, at, at + limit)
                    style = by_character[found] if found >= 0 else ""
                    at = found + 1 if found >= 0 else at
                    is_indent = (is_indent and character == " ") or character == "\n"
                    more = (*styles, style) if style and not is_indent else styles
                    if painted and painted[-1][1] == more:
                        painted[-1] = (painted[-1][0] + character, more)
                    else:
                        painted.append((character, more))
            return painted

        return paint


def describe_origins(spans: Sequence[Span]) -> tuple[Run, ...]:
    """A legend of the drafters' names."""
    runs: list[Run] = [("plain: the target   ", (MUTED,))]
    for origin in sorted({origin for _, origin, _ in spans if origin}):
        runs += [(origin.replace("+", " and "), (_select_style(origin, 1),)), ("   ", ())]
    return (*runs, ("bold: long runs", (MUTED,)))


def _select_style(origin: str, tokens: int) -> str:
    if not origin or origin == "structure":
        return ""
    names = list(drafter_specs())
    color = _SEVERAL if "+" in origin else "$text"
    if origin in names:
        color = _COLORS[names.index(origin) % len(_COLORS)]
    return f"{color} {'bold ' if tokens >= _MIN_LONG_RUN else ''}underline"
