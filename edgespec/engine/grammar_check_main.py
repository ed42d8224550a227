"""Compiles grammars, in the engine and in a helper process, where one that takes too long can be ended.

It imports little, since the helper starts again after each grammar that hung.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.isolated import answer_questions

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_FAULT = 300  # characters
_NOISE = re.compile(
    r"^(?:at )?(?:\d+\(\d+\): )*(?:failed to compile JSON schema: )?| <non-verbose/>| \(at .*\)$| \(in regex\)"
)
_DETAIL = re.compile(r"^error: (.+)$", re.MULTILINE)  # of a regular expression


@dataclass(frozen=True)
class TokenBytes:
    """A vocabulary in the form that llguidance reads. Tokens without text are spelled <|ID|>.

    ends    the tokens that end a generation; at least one
    encode  splits text into tokens; compilation needs none
    """

    tokens: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    bos_token_id: int | None
    ends: tuple[int, ...]
    encode: Callable[[bytes], list[int]] | None = None

    @property
    def eos_token_id(self) -> int:
        return min(self.ends)

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text) if self.encode is not None else []


def main() -> None:
    """Run the helper process: it gets a vocabulary, and says what is wrong with each grammar, "" for nothing."""
    answer_questions(_begin)


def _begin(token_bytes: TokenBytes) -> Callable[[str], str]:
    vocabulary = make_vocabulary(token_bytes)

    def find_fault(lark: str) -> str:
        matcher = compile_grammar(vocabulary, lark)
        return describe_fault(matcher.get_error()) if matcher.is_error() else ""

    return find_fault


def compile_grammar(vocabulary: LLTokenizer, lark: str) -> LLMatcher:
    """A matcher, which may be in error. Its limits keep one mask within about 0.2 seconds and 100 MB of states."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )
    return LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)


def describe_fault(error: str) -> str:
    """What llguidance says of a fault, on one line, without excerpts of the grammar and places in it."""
    if "NoExtensionBias" in error:
        return "it allows no text"
    text = _NOISE.sub("", " ".join(error.strip().partition("\n")[0].split())).rstrip(": ")
    if (detail := _DETAIL.search(error)) is not None:
        text = f"{text}: {detail[1]}"
    return text[:_MAX_FAULT].rstrip(".: ") or "unknown error"


def make_vocabulary(token_bytes: TokenBytes) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(token_bytes), eos_token=list(token_bytes.ends))
