"""Replaces control characters, so that no text can control the terminal."""

from __future__ import annotations

# C0 becomes the control pictures of Unicode; C1 has none and becomes the replacement character.
_PICTURES = {code: 0x2400 + code for code in range(0x20)} | dict.fromkeys(range(128, 160), 65533)
_TABLE = _PICTURES | {0x09: 0x09, 0x0A: 0x0A, 0x0D: 0x20, 0x7F: 0x2421}


def sanitize(text: str) -> str:
    """Replace every control character but tab and newline by one visible character; a carriage return by a space."""
    return text.translate(_TABLE)
