"""Compiles structures to grammars, beside the thread that decodes and within a deadline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from edgespec.core.sampling import Sampler
from edgespec.engine.grammar_check import DEADLINE_S, GrammarCheck
from edgespec.engine.grammar_check_main import Spelling, compile_grammar, make_vocabulary
from edgespec.engine.structured_output import Grammar, GrammarMask, Json, Part, Structure
from edgespec.errors import InvalidRequest
from edgespec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_REPEATS = 16  # of the alternatives of a repeated structure
_MAX_GRAMMAR = 2**20  # characters


class GrammarCompiler:
    """Compiles structures for one vocabulary, one at a time on a thread of its own, which needs no GIL for it."""

    def __init__(self, tokenizer: Tokenizer, deadline_s: float = DEADLINE_S) -> None:
        """`deadline_s` is for each structure; see GrammarCheck."""
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s

    def compile(self, structure: Structure) -> Future[LLMatcher]:
        """The matcher at the beginning of `structure`. A wait for it, and this call, raise InvalidRequest for a
        structure that cannot be compiled in time.
        """
        vocabulary, check, lark = self._vocabulary, self._check, self._lark(structure)
        if len(lark) > _MAX_GRAMMAR:
            raise InvalidRequest(
                f"the schemas have more than {_MAX_GRAMMAR:,} characters together.", hint="Send fewer tools."
            )

        def work() -> LLMatcher:
            check.require(lark)
            return compile_grammar(vocabulary, lark)

        return self._thread.submit(work)

    def constrain(self, structure: Structure, sampler: Sampler, prompt_length: int, after: bytes = b"") -> GrammarMask:
        """`sampler` masked by `structure`; see GrammarMask. Waits. Raises InvalidRequest."""
        return GrammarMask(self.compile(structure).result(), sampler, self._tokenizer, prompt_length, after)

    def close(self) -> None:
        """End the helper process and the thread."""
        made = vars(self)  # of the cached properties
        if "_thread" in made:
            self._check.close()
            self._thread.shutdown(cancel_futures=True)

    def _lark(self, structure: Structure) -> str:
        rules: list[str] = []

        def sequence(parts: Sequence[Part]) -> str:
            names = [f"part{len(rules)}x{i}" for i in range(len(parts))]
            rules.extend(f"{name}: {self._rule(part)}" for name, part in zip(names, parts, strict=True))
            return " ".join(names)

        alternatives = " | ".join(sequence(parts) for parts in structure.alternatives)
        more = "" if structure.between is None else f"more{{0,{_MAX_REPEATS - 1}}}"
        start = f"start: {sequence(structure.first)} alternative {more} {sequence(structure.last)}"
        another = f"more: {sequence(structure.between or ())} alternative"
        return "\n".join([start, f"alternative: {alternatives}", *([another] if more else ()), *rules])

    def _rule(self, part: Part) -> str:
        if isinstance(part, Json):
            return f"%json {part.schema}"
        if isinstance(part, Grammar):
            return f"%lark {{\n{part.lark}\n}}"
        tokens = self._tokenizer.encode(part.text, parse_special=True)
        if len(tokens) == 1 and not self._tokenizer.piece(tokens[0]):
            return f"<[{tokens[0]}]>"
        return json.dumps(part.text)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "edgespec-grammar")

    @cached_property
    def _check(self) -> GrammarCheck:
        made = self._spelling
        known = Spelling(made.tokens, made.special_token_ids, made.bos_token_id, made.ends)  # without the tokenizer
        return GrammarCheck(known, self._deadline_s)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return make_vocabulary(self._spelling)

    @cached_property
    def _spelling(self) -> _Spelled:
        return _spell(self._tokenizer)


@dataclass(frozen=True)
class _Spelled(Spelling):
    tokenizer: Tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self.tokenizer.encode(text.decode("utf-8", errors="replace"), parse_special=False)


def _spell(tokenizer: Tokenizer) -> _Spelled:
    ends = tokenizer.end_of_generation
    if not ends:
        raise InvalidRequest("this model has no token to end a structured answer with.", hint="Use another model.")
    pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
    special = [token for token, piece in enumerate(pieces) if not piece or token in ends]
    for token in special:
        pieces[token] = b"<|%d|>" % token
    return _Spelled(tuple(pieces), tuple(special), tokenizer.bos, tuple(sorted(ends)), tokenizer)
