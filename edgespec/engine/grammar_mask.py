"""A grammar masks the target's logits, as a part of its distribution, so drafts change nothing.

The mask comes before all sampling. Verification reads masked distributions row by row, so a drafted token that breaks
the grammar has probability zero and is never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgespec.backends.sequence import shared_prefix
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Draft, Verdict, Verifier
from edgespec.core.sampling import Distribution, Sampler, SamplingParams
from edgespec.core.scores import Scores
from edgespec.engine.grammar_check_main import describe_fault
from edgespec.errors import BackendError, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher


_EVERYTHING = 2**40


class GrammarMask:
    """The distribution of a sampler without the tokens that the grammar forbids. A TargetDistribution."""

    window = _EVERYTHING
    row_params: SamplingParams | None = None

    def __init__(self, matcher: LLMatcher, sampler: Sampler, start: int) -> None:
        """The grammar of `matcher` begins after `start` tokens."""
        self._matcher = matcher
        self._sampler = sampler
        self.start = start
        self._consumed: list[int] = []
        self._bits = np.zeros((1, -(-sampler.vocab_size // 32)), np.int32)

    def distribution(self, logits: Logits, prefix: Sequence[int]) -> Distribution:
        """The distribution after `prefix`. Raises InvalidRequest if the grammar becomes too complex."""
        if self._follow(prefix):
            allowed = self._allowed()[: len(logits)]
            params = self._sampler.row_params
            is_greedy = params is not None and params.temperature == 0
            if not is_greedy or not allowed[logits.argmax()]:
                logits = logits.copy()
                logits[~allowed] = -np.inf
        return self._sampler.distribution(logits, prefix)

    def forced(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that the grammar forces after the emitted `prefix`, as the tokenizer would spell them.

        Raises BackendError if the grammar forbids `prefix`.
        """
        self.require(prefix[self.start :])
        tokens = self._matcher.compute_ff_tokens()
        return tokens[: self._matcher.validate_tokens(tokens)]

    def require(self, answer: Sequence[int]) -> None:
        """Check the emitted tokens `answer`, which begin where the structure does and do not end the generation.

        Raises BackendError if the grammar forbids one: what follows could not be constrained.
        """
        if not self._advance(list(answer)):
            raise forbid(f"token {answer[len(self._consumed)]}")

    def require_end(self, answer: Sequence[int], end: int) -> None:
        """Check also that the token `end` may end the generation after `answer`."""
        self.require(answer)
        if not self._matcher.is_accepting() and not self._matcher.validate_tokens([end]):
            raise forbid("an early end")

    def ends(self, answer: list[int]) -> bool:
        """Whether nothing can follow the emitted tokens `answer`, which begin where the structure does."""
        self.require(answer)
        return self._matcher.is_stopped()

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """Whether the grammar allows each token next; longer than the vocabulary by up to 31."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        self._require_sound()
        return np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little").view(np.bool_)

    def _follow(self, prefix: Sequence[int]) -> bool:
        return self._advance(list(prefix[self.start :]))

    def _advance(self, wanted: list[int]) -> bool:
        """Advance the grammar to the end of `wanted`, or roll it back; returns whether it allows all of it."""
        common = len(self._consumed)
        if wanted[:common] != self._consumed:
            common = shared_prefix(self._consumed, wanted, len(wanted))
        if len(self._consumed) > common:
            self._matcher.rollback(len(self._consumed) - common)
        taken = self._matcher.try_consume_tokens(wanted[common:]) if len(wanted) > common else 0
        self._consumed = wanted[: common + taken]
        self._require_sound()
        # Block verification asks for distributions behind a forbidden token. That token is never accepted, so any
        # distribution is right there.
        return len(self._consumed) == len(wanted)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error()
            message = f"the answer's structure cannot be followed: {describe_fault(error)}."
            if error.startswith("panic"):  # a fault of llguidance, or of the vocabulary that it was given
                raise BackendError(message, hint="Report it, with the name of the model.")
            raise InvalidRequest(message)


def forbid(what: str) -> BackendError:
    """The error that ends an answer which a grammar has lost: nothing is generated without its constraint."""
    return BackendError(
        f"the answer was ended: its structure forbids {what}, which was chosen all the same.",
        hint="Report it, with the name of the model.",
    )


class MaskedVerifier:
    """A Verifier within a grammar: an emitted token that the grammar forbids is an error, whichever rule chose it."""

    def __init__(self, mask: GrammarMask, verifier: Verifier, ends: frozenset[int]) -> None:
        """`verifier` samples from `mask`; `ends` are the tokens that end a generation."""
        self._mask = mask
        self._verifier = verifier
        self._ends = ends

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        """Raises BackendError."""
        verdict = self._verifier.verify(draft, scores, prefix)
        answer = list(prefix[self._mask.start :])
        for token in (*(int(draft.tokens[node]) for node in verdict.path), verdict.next_token):
            if token in self._ends:  # the tokens behind it are not emitted
                self._mask.require_end(answer, token)
                return verdict
            answer.append(token)
        self._mask.require(answer)
        return verdict
