"""Text that a terminal shows and never obeys."""

from __future__ import annotations

# A picture of each control character in its place; of the others of C1 there is none.
_PICTURES = {code: 0x2400 + code for code in range(0x20)} | dict.fromkeys(range(128, 160), 65533)
_TABLE = _PICTURES | {0x09: 0x09, 0x0A: 0x0A, 0x0D: 0x20, 0x7F: 0x2421}


def sanitize(text: str) -> str:
    """`text` with every control character but tab and newline replaced; positions stay the same."""
    return text.translate(_TABLE)
