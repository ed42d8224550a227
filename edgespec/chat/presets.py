"""Presets: a system message and settings, kept by a name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.files import write_atomically
from edgespec.folders import data_folder

_NAME = re.compile(r"[\w-][\w.-]{0,63}")


def list_presets() -> list[str]:
    """The names, in order."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def read_preset(name: str) -> dict[str, Any]:
    """The settings of a preset by their names. Raises InvalidRequest."""
    path = _path(name)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = list_presets()
        hint = f"There are {', '.join(names)}." if names else "/preset save NAME keeps the settings of a chat."
        raise InvalidRequest(f"there is no preset '{name}'.", hint=hint) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} cannot be read: {reason_of(error)}.", hint="Save the preset again.") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path} is no preset.", hint="Save the preset again.")
    return found


def save_preset(name: str, settings: Mapping[str, Any]) -> None:
    """Replace the preset of this name. Raises InvalidRequest, CacheError."""
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, f"{json.dumps(settings, ensure_ascii=False, indent=1)}\n")
    except OSError as error:
        hint = "Free some space, or set EDGESPEC_DATA_DIR to another folder."
        raise CacheError(f"{path} cannot be written: {reason_of(error)}.", hint=hint) from error


def remove_preset(name: str) -> None:
    """Delete a preset. Raises InvalidRequest if there is none, and CacheError if it cannot be deleted."""
    read_preset(name)
    try:
        _path(name).unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"{_path(name)} cannot be removed: {reason_of(error)}.", hint="Check the folder.") from error


def _folder() -> Path:
    return data_folder() / "presets"


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        hint = "Use up to 64 letters, digits, '-' and '_'."
        raise InvalidRequest(f"'{name[:64]}' is no name of a preset.", hint=hint)
    return _folder() / f"{name}.json"
