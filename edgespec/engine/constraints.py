"""The constraint of a request, from its compilation to the verifier that follows it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.cancel import check_cancelled
from edgespec.core.peers import YIELD, Yield
from edgespec.core.protocols import Verifier
from edgespec.core.sampling import Sampler
from edgespec.engine.block_entry import BlockEntry
from edgespec.engine.events import Request
from edgespec.engine.generation import Generation
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.engine.grammar_mask import GrammarMask, MaskedVerifier
from edgespec.engine.steering import BlockVerifier, MakeVerifier, limit_reasoning

if TYPE_CHECKING:
    from llguidance import LLMatcher

Forced = Callable[[Sequence[int]], list[int] | None]
"""The tokens that a grammar forces after a text; None if none applies."""
_COMPILE_POLL_S = 0.001
_NEVER = -1e4  # a bias that leaves a token no probability


def constrain(
    generation: Generation, make_verifier: MakeVerifier, sampler: Sampler, grammars: GrammarCompiler
) -> tuple[Verifier, Forced | None]:
    """The verifier of a generation, whose grammar is compiled, and what the grammar forces."""
    request, tokenizer, matcher = generation.request, generation.tokenizer, generation.matcher
    if matcher is None:
        return limit_reasoning(make_verifier(sampler), generation), None
    if request.opening is None and not generation.starts_inside:
        mask = GrammarMask(matcher, sampler, len(generation.encoded.tokens))
        return MaskedVerifier(mask, make_verifier(mask), tokenizer.end_of_generation), mask.forced
    if request.opening is not None:
        entry, free = BlockEntry(grammars.boundary((request.opening,)), matcher), sampler
    else:  # the answer must not end before its structure
        assert generation.reasoning is not None
        closers = tuple(generation.reasoning.states["reasoning"].markers)
        entry = BlockEntry(grammars.boundary(closers), matcher)
        never = ((token, _NEVER) for token in tokenizer.end_of_generation)
        biases = (*sampler.params.logit_bias, *never)
        free = Sampler(replace(sampler.params, logit_bias=biases), sampler.vocab_size)
    limited = limit_reasoning(make_verifier(entry.limit(free)), generation)
    blocks = BlockVerifier(request.opening, entry, make_verifier, limited, sampler, generation.open_text())
    return blocks, blocks.forced


def compile_constraint(request: Request, grammars: GrammarCompiler) -> Generator[Yield, None, LLMatcher | None]:
    """A matcher at the beginning of the request's grammar, or None if it has none. Others decode while it is compiled.

    Raises InvalidRequest, BackendError.
    """
    if request.structure is None:
        return None
    compiling = grammars.compile(request.structure)
    try:
        while not wait([compiling], _COMPILE_POLL_S).done:
            check_cancelled()
            yield YIELD
    finally:
        compiling.cancel()
    return compiling.result()


def list_unenforced(request: Request, matcher: LLMatcher | None) -> tuple[str, ...]:
    """What of the request's schemas the grammar of `matcher` leaves out, in sentences."""
    if request.structure is None or matcher is None:
        return ()
    found = (each.rstrip(".") for each in matcher.get_grammar_warnings())
    return (*request.structure.unenforced, *(f"the schema is not enforced as a whole: {each}." for each in found))
