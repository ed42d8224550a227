"""Compiles structures to grammars, beside the thread that decodes and within a deadline."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property, lru_cache
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, Any, cast

from edgespec.backends.isolated import python_command
from edgespec.core.protocols import YIELD, CheckCancelled, Verifier, Yield
from edgespec.core.sampling import Sampler
from edgespec.engine.events import Request
from edgespec.engine.generation import BlockVerifier, Generation, MakeVerifier, limit_reasoning
from edgespec.engine.grammar_check_main import TokenBytes, compile_grammar, main, make_vocabulary
from edgespec.engine.structured_output import Grammar, GrammarMask, Json, Part, Structure
from edgespec.errors import InvalidRequest
from edgespec.text.stream import ReasoningFormat
from edgespec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# Whether a grammar compiles in time, found out in a process that can be ended.
#
# No bound on the text of a schema bounds the time of its compilation: llguidance compares regular expressions with each
# other, and native code cannot be interrupted. So each grammar is compiled in a helper process first. Past the deadline
# that process is killed and the grammar refused. Compilation depends on nothing but the grammar and the vocabulary, so
# in the engine's process a grammar that passed takes about as long as it did there.


DEADLINE_S = 3.0
_MAX_REMEMBERED = 64  # grammars, with their verdicts


class GrammarCheck:
    """The helper process of one vocabulary. It starts with the first check, and again after a grammar that hung."""

    def __init__(self, token_bytes: TokenBytes, deadline_s: float = DEADLINE_S) -> None:
        """`deadline_s` is for each grammar, without the helper's start."""
        self._token_bytes = token_bytes
        self._deadline_s = deadline_s
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._judge = lru_cache(_MAX_REMEMBERED)(self._ask)

    def require(self, grammar: str) -> None:
        """Raises InvalidRequest for a grammar that does not compile, or not in time. Any thread; may wait."""
        with self._lock:
            fault = self._judge(grammar)
        if fault:
            raise InvalidRequest(
                f"the answer's structure cannot be followed: {fault}.",
                hint="Simplify it; without strict, what cannot be enforced is left out.",
            )

    def close(self) -> None:
        """End the helper, also while a grammar is being compiled in it."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _ask(self, grammar: str) -> str:
        """What is wrong with `grammar`; "" where it is sound."""
        try:
            process = self._running()
        except (OSError, EOFError, pickle.PickleError):
            self._end()
            return "the process that compiles grammars cannot be started"
        timer = Timer(self._deadline_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            pickle.dump(grammar, _pipe(process.stdin))
            _pipe(process.stdin).flush()
            return str(pickle.load(_pipe(process.stdout)))
        except (OSError, EOFError, pickle.PickleError):  # killed, or dead for want of memory
            self._end()
            return f"it is too complex (its grammar needs more than {self._deadline_s:g} seconds or too much memory)"
        finally:
            timer.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        """The helper, ready for a grammar."""
        if self._process is not None and self._process.poll() is not None:  # it died while it had nothing to do
            self._end()
        if self._process is None:
            self._process = process = subprocess.Popen(
                python_command(main),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            pickle.dump((self._token_bytes, self._deadline_s), _pipe(process.stdin))
            _pipe(process.stdin).flush()
            pickle.load(_pipe(process.stdout))  # it has built its vocabulary
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _pipe(process.stdin).close()
            _pipe(process.stdout).close()


def _pipe(stream: IO[bytes] | None) -> Any:
    return cast(IO[bytes], stream)


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
        tokens = self._tokenizer.encode(part, parse_special=True)
        if len(tokens) == 1 and not self._tokenizer.piece(tokens[0]):
            return f"<[{tokens[0]}]>"
        return json.dumps(part)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "edgespec-grammar")

    @cached_property
    def _check(self) -> GrammarCheck:
        return GrammarCheck(replace(self._token_bytes, encode=None), self._deadline_s)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return make_vocabulary(self._token_bytes)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        tokenizer = self._tokenizer
        ends = tokenizer.end_of_generation
        if not ends:
            raise InvalidRequest("this model has no token to end a structured answer with.", hint="Use another model.")
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        special = [token for token, piece in enumerate(pieces) if not piece or token in ends]
        for token in special:
            pieces[token] = b"<|%d|>" % token

        def encode(text: bytes) -> list[int]:
            return tokenizer.encode(text.decode("utf-8", errors="replace"), parse_special=False)

        return TokenBytes(tuple(pieces), tuple(special), tokenizer.bos, tuple(sorted(ends)), encode)


# What the grammar of a request does to its generation.


Forced = Callable[[Sequence[int]], list[int] | None]
"""The tokens that a grammar forces after a text; None where none applies."""
_COMPILE_POLL_S = 0.001


def constrain(generation: Generation, make_verifier: MakeVerifier, sampler: Sampler) -> tuple[Verifier, Forced | None]:
    """The verifier of a generation, whose grammar is compiled, and what the grammar forces."""
    request, encoded, matcher = generation.request, generation.encoded, generation.matcher
    if matcher is not None and request.structure is not None:
        end = _find_end(generation.reasoning, encoded.tail)
        mask = GrammarMask(matcher, sampler, generation.tokenizer, len(encoded.tokens), end)
        return limit_reasoning(make_verifier(mask), generation), mask.forced
    free = limit_reasoning(make_verifier(sampler), generation)
    if matcher is None or request.block is None:
        return free, None
    text, tokenizer = generation.open_text(), generation.tokenizer
    blocks = BlockVerifier(request.block.opening, matcher, make_verifier, free, sampler, text, tokenizer)
    return blocks, blocks.forced


def compile_constraint(
    request: Request, grammars: GrammarCompiler, check: CheckCancelled
) -> Generator[Yield, None, LLMatcher | None]:
    """The request's grammar at its beginning, if it has one. Others decode meanwhile. Raises InvalidRequest."""
    if request.grammar is None:
        return None
    if request.structure is not None and request.start is not None:
        raise InvalidRequest("structured output cannot be continued.", hint="Ask for the whole answer.")
    compiling = grammars.compile(request.grammar)
    try:
        while not wait([compiling], _COMPILE_POLL_S).done:
            check()
            yield YIELD
    finally:
        compiling.cancel()
    return compiling.result()


def list_unenforced(request: Request, matcher: LLMatcher | None) -> tuple[str, ...]:
    """What of the request's schemas the grammar of `matcher` leaves out, in sentences."""
    if request.grammar is None or matcher is None:
        return ()
    found = (each.rstrip(".") for each in matcher.get_grammar_warnings())
    return (*request.grammar.unenforced, *(f"the schema is not enforced as a whole: {each}." for each in found))


def _find_end(reasoning: ReasoningFormat | None, prompt_tail: str) -> bytes:
    """The marker that ends the reasoning which the prompt has begun; b"" if it has begun none."""
    if reasoning is None or not reasoning.starts_inside(prompt_tail):
        return b""
    markers = reasoning.states["reasoning"].markers
    return next(marker for marker, state in markers.items() if state == "answer").encode()
