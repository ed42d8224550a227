"""References for people: local paths as file names, packaged files without prefix."""

from __future__ import annotations

from pathlib import Path

from edgespec.models.references import PATH_STARTS


def shorten_names(text: str) -> str:
    """A reference, or several joined by '+', for people: local paths as file names, packaged files without prefix."""
    return "+".join(_shorten_name(part) for part in text.split("+"))


def _shorten_name(text: str) -> str:
    if text.startswith("package:"):
        return text.removeprefix("package:").removesuffix(".gguf")
    return Path(text).name or text if text.startswith(PATH_STARTS) else text
