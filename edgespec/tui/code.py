"""Source code with the styles of its language."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Token
from pygments.util import ClassNotFound

_STYLES = {
    Token.Comment: "$foreground 60% italic",
    Token.Generic.Deleted: "$text-error",
    Token.Generic.Inserted: "$text-success",
    Token.Generic.Heading: "bold",
    Token.Keyword: "$text-accent",
    Token.Keyword.Constant: "$text-warning",
    Token.Literal.Number: "$text-warning",
    Token.Literal.String: "$text-success",
    Token.Name.Builtin: "$text-secondary",
    Token.Name.Class: "$text-primary bold",
    Token.Name.Decorator: "$text-secondary",
    Token.Name.Function: "$text-primary",
    Token.Name.Tag: "$text-primary",
    Token.Name.Attribute: "$text-secondary",
    Token.Operator.Word: "$text-accent",
}
_PYTHON_LINE = re.compile(
    r"\s*(?:(?:def|class)\s+\w+.*:?|@\w[\w.]*.*|import\s+[\w., ]+|from\s+[\w.]+\s+import\s.+|return\b.*"
    r"|(?:if|elif|for|while|with|try|except|else|finally)\b.*:|self\.\w+.*|\w+ = .+|>>> .+)"
)


def highlight(code: str, language: str) -> list[tuple[str, tuple[str, ...]]]:
    """`code` in runs of one style; in one run where `language` is not known to Pygments."""
    lexer = _find_lexer(language)
    if lexer is None:
        return [(code, ())]
    runs = [(text, _select_styles(token)) for _, token, text in lexer.get_tokens_unprocessed(code)]
    return runs if "".join(text for text, _ in runs) == code else [(code, ())]


def is_python(text: str) -> bool:
    """Whether a text, as a model that completes texts writes it, looks like Python: half of its lines do."""
    lines = [line for line in text.splitlines() if line.strip()]
    return 2 * sum(_PYTHON_LINE.fullmatch(line) is not None for line in lines) >= len(lines) > 0


def may_be_code(text: str) -> bool:
    """Whether a message may be the beginning of code: it looks like Python, or has characters that prose seldom has."""
    return is_python(text) or any(each in "()[]{}<>=#@_" for each in text)


@lru_cache(64)
def _find_lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language) if language else None
    except ClassNotFound:
        return None


@lru_cache(512)
def _select_styles(token: Any) -> tuple[str, ...]:
    """Of the token or the nearest kind that it belongs to."""
    while token is not None:
        if token in _STYLES:
            return (_STYLES[token],)
        token = token.parent
    return ()
