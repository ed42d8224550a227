"""Replaces control characters, so that no text can control the terminal or show its characters in another order."""

from __future__ import annotations

# C0 becomes the control pictures of Unicode; C1 has none and becomes the replacement character.
_PICTURES = {code: 0x2400 + code for code in range(0x20)} | dict.fromkeys(range(128, 160), 65533)
_BIDI = {code: f"‹U+{code:X}›" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # noqa: RUF001
_TABLE: dict[int, int | str] = {**_PICTURES, **_BIDI, 0x09: 0x09, 0x0A: 0x0A, 0x0D: 0x20, 0x7F: 0x2421}


def sanitize(text: str) -> str:
    """Replace every control character but tab and newline by one visible character, a carriage return by a space, and
    every control of the direction of writing by its number.
    """
    return text.translate(_TABLE)
