"""Blocks of an answer, such as tool calls, that follow a grammar; the text around them is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edgespec.core.protocols import Draft, Verdict, Verifier
from edgespec.core.sampling import Sampler
from edgespec.core.scores import Scores
from edgespec.core.verify import TargetDistribution
from edgespec.engine.structured_output import GrammarMask
from edgespec.text.stream import TextStream
from edgespec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MakeVerifier = Callable[[TargetDistribution], Verifier]


class BlockVerifier:
    """A Verifier that leaves the text free up to the end of an opening, masks it up to the end of the block, and so on.

    A verdict is cut behind the token that begins or ends a block. Where that is depends only on tokens that are
    emitted, so the text up to there is distributed as the target's, and each token of a block as the target's within
    the grammar. Outside of blocks no mask is computed. Openings in the reasoning do not count.
    """

    def __init__(
        self,
        opening: str,
        matcher: LLMatcher,
        make_verifier: MakeVerifier,
        free: Verifier,
        sampler: Sampler,
        text: TextStream,
        tokenizer: Tokenizer,
    ) -> None:
        """`matcher` is at the beginning of a block, `free` verifies the text outside, `text` is at the beginning of the
        answer; this object pushes the tokens to it.
        """
        self._opening = opening
        self._matcher = matcher
        self._make_verifier = make_verifier
        self._free = self._verifier = free
        self._sampler = sampler
        self._text = text
        self._tokenizer = tokenizer
        self._mask: GrammarMask | None = None  # of the present block
        self._block: list[int] = []  # its tokens behind the opening's
        self._tail = ""  # the end of the free text, in which an opening may have begun

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        verdict = self._verifier.verify(draft, scores, prefix)
        for n, node in enumerate(verdict.path):
            token = int(draft.tokens[node])
            if self._take(token, len(prefix) + n + 1):
                return Verdict(verdict.path[:n], token)
        self._take(verdict.next_token, len(prefix) + len(verdict.path) + 1)
        return verdict

    def forced(self, prefix: Sequence[int]) -> list[int] | None:
        """The tokens that the grammar forces after `prefix`; None outside of blocks."""
        return None if self._mask is None else self._mask.forced(prefix)

    def _take(self, token: int, position: int) -> bool:
        """Add a token, with which there are `position` tokens; returns whether a block begins or ends behind it."""
        pieces = self._text.push(token, "")
        if self._mask is None:
            self._tail += "".join(piece.text for piece in pieces if piece.channel == "answer")
            return self._find_opening(position)
        self._block.append(token)
        if not self._mask.ends(self._block):
            return False
        self._verifier, self._mask, self._block = self._free, None, []
        return True

    def _find_opening(self, position: int) -> bool:
        """Enter a block if the tail has an opening. What its last token holds beyond it belongs to the block; if the
        grammar does not take that, the text stays free.
        """
        _, opening, rest = self._tail.partition(self._opening)
        if not opening:
            self._tail = self._tail[-len(self._opening) :]
            return False
        self._tail = ""
        matcher, begun = self._matcher.deep_copy(), self._tokenizer.encode(rest, parse_special=False)
        if begun and matcher.try_consume_tokens(begun) < len(begun):
            return False
        self._mask = GrammarMask(matcher, self._sampler, self._tokenizer, position, b"")
        self._verifier = self._make_verifier(self._mask)
        return True
