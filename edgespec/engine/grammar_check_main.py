"""The helper process of grammar_check: reads grammars, compiles them, and writes what is wrong with each.

It imports little, since it starts again after each grammar that hung.
"""

from __future__ import annotations

import pickle
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_EXTRA_BYTES = 2**30  # of memory, for all that compilation takes
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
        """The tokens of `text`."""
        return self.encode(text) if self.encode is not None else []


def main() -> None:
    """Compile grammars until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads the answers
    source, target = sys.stdin.buffer, sys.stdout.buffer
    token_bytes, deadline_s = pickle.load(source)
    vocabulary = make_vocabulary(token_bytes)
    _limit_memory()
    fault = ""  # the first answer says that the vocabulary is built
    while True:
        pickle.dump(fault, target)
        target.flush()
        try:
            grammar = pickle.load(source)
        except EOFError:
            return
        _set_alarm(deadline_s + 1)  # the kernel ends this process where the parent has died meanwhile
        matcher = compile_grammar(vocabulary, grammar)
        fault = describe_fault(matcher.get_error()) if matcher.is_error() else ""
        _set_alarm(0)


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
    """The index of a vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(token_bytes), eos_token=list(token_bytes.ends))


def _limit_memory() -> None:
    """Let this process take no more than a fixed number of bytes from here, where the system can bound it."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + _MAX_EXTRA_BYTES, hard))


def _set_alarm(seconds: float) -> None:
    """Have the kernel end this process after `seconds`, native code or not; 0: it lives on."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
