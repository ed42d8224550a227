"""Compiles structures to grammars, beside the thread that decodes and within a deadline."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

from edgespec.engine.block_entry import Boundary
from edgespec.engine.grammar_check_main import TokenBytes, compile_grammar, make_vocabulary
from edgespec.engine.structure import Either, Grammar, Json, Maybe, Part, Structure
from edgespec.errors import BackendError, InvalidRequest
from edgespec.isolated import ChildDied, ChildStopped, Helper
from edgespec.text.tokenizer import Tokenizer, encode_inside

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


DEADLINE_S = 3.0
_MAX_BYTES = 3 * 2**29  # memory of the process that compiles
_MAX_REMEMBERED = 64  # grammars, with their verdicts
_MAX_MARKERS = 4  # boundaries of a model: of its reasoning and its calls
_MAX_REPEATS = 16  # how many alternatives in a row a repeated structure may have
_MAX_GRAMMAR = 2**20  # characters


class GrammarCompiler:
    """Compiles structures for one vocabulary, one at a time on a thread of its own, which needs no GIL for it.

    No bound on the text of a schema bounds the time of its compilation: llguidance compares regular expressions with
    each other, and native code cannot be interrupted. So each grammar is compiled in a helper process first. Past the
    deadline that process is killed and the grammar refused. Compilation depends on nothing but the grammar and the
    vocabulary, so here a grammar that passed takes about as long as it did there.
    """

    def __init__(self, tokenizer: Tokenizer, deadline_s: float = DEADLINE_S) -> None:
        """`deadline_s` is for each structure, without the helper's start."""
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._find_fault = lru_cache(_MAX_REMEMBERED)(self._ask)
        self.boundary = lru_cache(_MAX_MARKERS)(partial(Boundary, tokenizer))  # by its markers

    def compile(self, structure: Structure) -> Future[LLMatcher]:
        """The matcher at the beginning of `structure`. A wait for it, and this call, raise InvalidRequest for a
        structure that cannot be compiled in time. The wait raises BackendError if the helper fails.
        """
        (vocabulary, _, thread), lark = self._tools, self._lark(structure)
        if len(lark) > _MAX_GRAMMAR:
            raise InvalidRequest(f"the structure has more than {_MAX_GRAMMAR:,} characters.")

        def work() -> LLMatcher:
            try:
                fault = self._find_fault(lark)
            except ChildDied as error:
                message = f"the answer's structure was not checked: its compilation {error}."
                raise BackendError(message, hint="Try again, or simplify it.") from error
            if fault:
                message = f"the answer's structure cannot be followed: {fault}."
                is_unknown = fault.startswith("Unimplemented keys")
                hint = "Remove them; without strict they are not enforced." if is_unknown else "Correct or simplify it."
                raise InvalidRequest(message, hint=hint)
            return compile_grammar(vocabulary, lark)

        return thread.submit(work)

    def close(self) -> None:
        """End the helper process and the thread."""
        if "_tools" in vars(self):
            _, helper, thread = self._tools
            helper.close()
            thread.shutdown(cancel_futures=True)

    def _ask(self, lark: str) -> str:
        """What is wrong with a grammar; "" if it is sound. Raises ChildDied if another try may find out."""
        try:
            return str(self._tools[1].ask(lark))
        except ChildStopped as error:
            return f"it is too complex: its compilation {error}"

    def _lark(self, structure: Structure) -> str:
        rules: list[str] = []

        def name_rule(text: str, attribute: str = "") -> str:
            rules.append(f"part{len(rules)}{attribute}: {text}")
            return f"part{len(rules) - 1}"

        def write(part: Part) -> str:
            match part:
                case str():
                    return self._write_text(part)
                case Json():
                    return name_rule(f"%json {part.schema}")
                case Grammar():
                    return name_rule(f"%lark {{\n{part.lark}\n}}")
                case Maybe():
                    return f"({write_all(part.parts)})?"
                case Either():
                    return "(" + " | ".join(map(write_all, part.alternatives)) + ")"
            if self._write_text(part.end).startswith("<["):  # a text ends where a control token begins
                return f"{name_rule(f'/{part.pattern}/')} {self._write_text(part.end)}"
            end = re.escape(part.end).replace("/", "\\/").replace("\n", "n")
            return name_rule(f"/{part.pattern}{end}/", "[lazy]")

        def write_all(parts: Sequence[Part]) -> str:
            return " ".join(filter(None, map(write, parts))) or '""'

        alternatives = " | ".join(map(write_all, structure.alternatives))
        more = "" if structure.between is None else f"more{{0,{_MAX_REPEATS - 1}}}"
        start = f"start: {write_all(structure.first)} alternative {more} {write_all(structure.last)}"
        another = f"more: {write_all(structure.between or ())} alternative"
        return "\n".join([start, f"alternative: {alternatives}", *([another] if more else ()), *rules])

    def _write_text(self, text: str) -> str:
        """Literal text. A control token that ends the generation is left out: it comes when the structure is whole."""
        tokenizer = self._tokenizer
        found = {token for token in tokenizer.encode(text, parse_special=True) if not tokenizer.piece(token)}
        control = {spelling: token for token in found if (spelling := tokenizer.special_text(token)) in text}
        pattern = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
        written: list[str] = []
        for piece in re.split(f"({pattern})", text) if control else [text]:
            if (token := control.get(piece)) is None:
                written += [json.dumps(piece)] if piece else []
            elif token not in tokenizer.end_of_generation:
                written.append(f"<[{token}]>")
        return " ".join(written)

    @cached_property
    def _tools(self) -> tuple[LLTokenizer, Helper, ThreadPoolExecutor]:
        """The vocabulary, the helper that checks grammars, and the thread."""
        tokenizer = self._tokenizer
        ends = tokenizer.end_of_generation
        if not ends:
            raise InvalidRequest("this model has no token to end a structured answer with.", hint="Use another model.")
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        special = [token for token, piece in enumerate(pieces) if not piece or token in ends]
        for token in special:
            pieces[token] = b"<|%d|>" % token

        plain = TokenBytes(tuple(pieces), tuple(special), tokenizer.bos, tuple(sorted(ends)))
        helper = Helper("edgespec.engine.grammar_check_main", plain, self._deadline_s, _MAX_BYTES)
        vocabulary = make_vocabulary(replace(plain, encode=Spelling(tokenizer, plain)))
        return vocabulary, helper, ThreadPoolExecutor(1, "edgespec-grammar")


class Spelling:
    """Splits text in the middle of an answer into tokens, for llguidance: their bytes are exactly the text's."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    def __call__(self, text: bytes) -> list[int]:
        """The tokenizer's own tokens, or the longest ones that fit if it spells the text otherwise, up to a byte
        that no token begins with.
        """
        tokens = encode_inside(self._tokenizer, text.decode())
        return self._split(text) if tokens is None else tokens

    def _split(self, text: bytes) -> list[int]:
        tokens: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), at)
            if end == at:
                break
            tokens.append(self._ids[text[at:end]])
            at = end
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self._vocabulary.special_token_ids)
        return {piece: token for token, piece in enumerate(self._vocabulary.tokens) if token not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))
