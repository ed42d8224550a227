"""What the grammar of a request does to its generation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.core.batching import YIELD, Yield
from edgespec.core.protocols import CheckCancelled, Verifier
from edgespec.core.sampling import Sampler
from edgespec.engine.blocks import BlockVerifier, MakeVerifier
from edgespec.engine.events import Request
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.engine.prompts import EncodedPrompt
from edgespec.engine.reasoning_limit import limit_reasoning
from edgespec.engine.structured_output import GrammarMask
from edgespec.errors import InvalidRequest
from edgespec.text.reasoning import ReasoningFormat
from edgespec.text.stream import TextStream
from edgespec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Forced = Callable[[Sequence[int]], list[int] | None]
"""The tokens that a grammar forces after a text; None where none applies."""
_COMPILE_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a request demands of its answer: a grammar, a limit of the reasoning, or nothing.

    matcher  at the beginning of the request's grammar; None without one
    """

    request: Request
    prompt: EncodedPrompt
    matcher: LLMatcher | None
    reasoning: ReasoningFormat | None
    tokenizer: Tokenizer

    def apply(self, make_verifier: MakeVerifier, sampler: Sampler) -> tuple[Verifier, Forced | None]:
        """The verifier of the generation, and what a grammar forces."""
        request, prompt, tokenizer = self.request, self.prompt, self.tokenizer
        if self.matcher is not None and request.structure is not None:
            end = _find_end(self.reasoning, prompt.tail)
            mask = GrammarMask(self.matcher, sampler, tokenizer, len(prompt.tokens), end)
            return self._limit(make_verifier(mask)), mask.forced
        free = self._limit(make_verifier(sampler))
        if self.matcher is None or request.block is None:
            return free, None
        text = TextStream(tokenizer, (), self.reasoning, prompt.tail, request.visible, start=prompt.start)
        blocks = BlockVerifier(request.block.opening, self.matcher, make_verifier, free, sampler, text, tokenizer)
        return blocks, blocks.forced

    def _limit(self, verifier: Verifier) -> Verifier:
        return limit_reasoning(verifier, self.request, self.prompt, self.reasoning, self.tokenizer)


def compile_grammar(
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


def _find_end(reasoning: ReasoningFormat | None, prompt_tail: str) -> bytes:
    """The marker that ends the reasoning which the prompt has begun; b"" if it has begun none."""
    if reasoning is None or not reasoning.starts_inside(prompt_tail):
        return b""
    markers = reasoning.states["reasoning"].markers
    return next(marker for marker, state in markers.items() if state == "answer").encode()
