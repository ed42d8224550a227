"""Tells code from prose, for models that only complete code."""

from __future__ import annotations

import re

_PYTHON_LINE = re.compile(
    r"\s*(?:(?:def|class)\s+\w+.*:?|@\w[\w.]*.*|import\s+[\w., ]+|from\s+[\w.]+\s+import\s.+|return\b.*"
    r"|(?:if|elif|for|while|with|try|except|else|finally)\b.*:|self\.\w+.*|\w+ = .+|>>> .+)"
)


def is_python(text: str) -> bool:
    """Whether a text, as a model that completes texts writes it, looks like Python: half of its lines do."""
    lines = [line for line in text.splitlines() if line.strip()]
    return 2 * sum(_PYTHON_LINE.fullmatch(line) is not None for line in lines) >= len(lines) > 0


def may_be_code(text: str) -> bool:
    """Whether a message may be the beginning of code: it looks like Python, or has characters that prose seldom has."""
    return is_python(text) or any(each in "()[]{}<>=#@_" for each in text)
