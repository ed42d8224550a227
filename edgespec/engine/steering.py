"""Verifiers that read the text which they emit: blocks of a grammar, and a limit of the reasoning."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from edgespec.core.protocols import Draft, Verdict, Verifier
from edgespec.core.sampling import Sampler
from edgespec.core.scores import Scores
from edgespec.core.verify import TargetDistribution
from edgespec.engine.block_entry import BlockEntry
from edgespec.engine.generation import Generation
from edgespec.engine.grammar_mask import GrammarMask, MaskedVerifier
from edgespec.text.stream import TextStream

MakeVerifier = Callable[[TargetDistribution], Verifier]


class _TextVerifier:
    """A Verifier that wraps another, and reads the text that is emitted.

    A verdict is cut behind a token after which another rule begins. Where that is depends only on tokens that are
    emitted, so the text up to there is distributed as the wrapped verifier's.
    """

    def __init__(self, verifier: Verifier, text: TextStream) -> None:
        """`text` is at the beginning of the answer; this object pushes the tokens to it."""
        self._verifier = verifier
        self._text = text

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        verdict = self._verifier.verify(draft, scores, prefix)
        for n, node in enumerate(verdict.path):
            token = int(draft.tokens[node])
            if self._take(token, len(prefix) + n + 1):
                return Verdict(verdict.path[:n], token)
        self._take(verdict.next_token, len(prefix) + len(verdict.path) + 1)
        return verdict

    def _take(self, token: int, position: int) -> bool:
        """Add a token, with which there are `position` tokens; returns whether another rule begins behind it."""
        raise NotImplementedError


class BlockVerifier(_TextVerifier):
    """Leaves the text free up to the end of an opening, masks it up to the end of the block, and so on.

    Each token of a block is distributed as the target's within the grammar. Outside of blocks no mask is computed.
    Openings in the reasoning do not count. Without an opening the one block begins where the reasoning ends.
    """

    def __init__(
        self,
        opening: str | None,
        entry: BlockEntry,
        make_verifier: MakeVerifier,
        free: Verifier,
        sampler: Sampler,
        text: TextStream,
    ) -> None:
        """`free` verifies the text outside of blocks."""
        super().__init__(free, text)
        self._opening = opening
        self._entry = entry
        self._make_verifier = make_verifier
        self._free = free
        self._sampler = sampler
        self._mask: GrammarMask | None = None  # of the present block
        self._block: list[int] = []  # its tokens behind the opening's
        self._tail = ""  # the end of the free text, in which an opening may have begun
        self._before = b""  # the last bytes of the free text

    def forced(self, prefix: Sequence[int]) -> list[int] | None:
        """The tokens that the grammar forces after `prefix`; None outside of blocks."""
        return None if self._mask is None else self._mask.forced(prefix)

    def _take(self, token: int, position: int) -> bool:
        pieces = self._text.push(token, "")
        if self._mask is not None:
            self._block.append(token)
            if self._opening is None or not self._mask.ends(self._block):
                return False
            self._verifier, self._mask, self._block = self._free, None, []
            return True
        before, boundary = self._before, self._entry.boundary
        self._before = (before + boundary.tokenizer.piece(token))[-boundary.width :]
        if self._opening is None:
            return self._text.channel == "answer" and self._enter(before, token, position)
        self._tail += "".join(piece.text for piece in pieces if piece.channel == "answer")
        has_opened = self._opening in self._tail
        self._tail = "" if has_opened else self._tail[-len(self._opening) :]
        return has_opened and self._enter(before, token, position)

    def _enter(self, before: bytes, token: int, position: int) -> bool:
        """Begin a block behind `token`, the last one of the free text."""
        matcher = self._entry.begin(before, token)
        mask = GrammarMask(matcher, self._sampler, position)
        if self._opening is not None and mask.ends([]):  # the token holds the whole block
            return False
        ends = self._entry.boundary.tokenizer.end_of_generation
        self._mask, self._verifier = mask, MaskedVerifier(mask, self._make_verifier(mask), ends)
        return True


_MAX_LATE = 8  # tokens beyond the limit in which a character or a marker may be completed


class ReasoningLimit(_TextVerifier):
    """Leaves verification to `verifier` up to `budget` tokens of reasoning, and then emits the tokens `closing`.

    Reasoning that begins again is ended at once. A character and a marker that the model has begun are completed first.
    """

    def __init__(self, verifier: Verifier, text: TextStream, budget: int, closing: Sequence[int]) -> None:
        super().__init__(verifier, text)
        self._left = budget
        self._closing = closing
        self._forced: deque[int] = deque()
        self._check()

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        if not self._forced:
            return super().verify(draft, scores, prefix)
        token = self._forced.popleft()
        self._text.push(token, "")
        return Verdict((), token)

    def _take(self, token: int, position: int) -> bool:
        was_reasoning = self._text.channel == "reasoning"
        self._text.push(token, "")
        if was_reasoning and self._text.channel == "reasoning":
            self._left -= 1
        self._check()
        return bool(self._forced)

    def _check(self) -> None:
        is_due = self._text.channel == "reasoning" and self._left <= 0
        if is_due and (not self._text.holds_text or self._left <= -_MAX_LATE):
            self._forced.extend(self._closing)


def limit_reasoning(verifier: Verifier, generation: Generation) -> Verifier:
    """`verifier` within the request's limit, if it has one and its answer may have reasoning."""
    request, reasoning = generation.request, generation.reasoning
    if request.max_reasoning is None or reasoning is None or not isinstance(request.prompt, tuple):
        return verifier
    closing = generation.tokenizer.encode(reasoning.after, parse_special=True)
    return ReasoningLimit(verifier, generation.open_text(), request.max_reasoning, closing)
