"""A limit of the reasoning: once it is reached, the text continues with the marker that ends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgespec.core.protocols import Draft, Verdict, Verifier
from edgespec.core.scores import Scores
from edgespec.engine.events import Request
from edgespec.engine.prompts import EncodedPrompt
from edgespec.text.reasoning import ReasoningFormat
from edgespec.text.stream import TextStream
from edgespec.text.tokenizer import Tokenizer

_MAX_LATE = 8  # tokens beyond the limit in which a character or a marker may be completed


class ReasoningLimit:
    """A Verifier that wraps another until `budget` tokens of reasoning are emitted; then it emits the tokens `closing`.

    A verdict is cut where the limit is reached. Where that is depends only on tokens that are emitted, and these are
    distributed as the target's; so are the tokens after the marker, given the text before them. Reasoning that begins
    again is ended at once. A character and a marker that the model has begun are completed first.
    """

    def __init__(self, verifier: Verifier, text: TextStream, budget: int, closing: Sequence[int]) -> None:
        """`text` is at the beginning of the answer; this object pushes the tokens to it."""
        self._verifier = verifier
        self._text = text
        self._left = budget
        self._closing = closing
        self._forced: deque[int] = deque()
        self._check()

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        if self._forced:
            return Verdict((), self._force())
        verdict = self._verifier.verify(draft, scores, prefix)
        for n, node in enumerate(verdict.path):
            self._take(int(draft.tokens[node]))
            if self._forced:
                return Verdict(verdict.path[: n + 1], self._force())
        self._take(verdict.next_token)
        return verdict

    def _take(self, token: int) -> None:
        was_reasoning = self._text.channel == "reasoning"
        self._text.push(token, "")
        if was_reasoning and self._text.channel == "reasoning":
            self._left -= 1
        self._check()

    def _check(self) -> None:
        is_due = self._text.channel == "reasoning" and self._left <= 0
        if is_due and (not self._text.holds_text or self._left <= -_MAX_LATE):
            self._forced.extend(self._closing)

    def _force(self) -> int:
        token = self._forced.popleft()
        self._text.push(token, "")
        return token


def limit_reasoning(
    verifier: Verifier, request: Request, prompt: EncodedPrompt, reasoning: ReasoningFormat | None, tokenizer: Tokenizer
) -> Verifier:
    """`verifier` within the request's limit, if it has one and its answer may have reasoning.

    A structure that begins with the answer leaves no place for reasoning.
    """
    if request.max_reasoning is None or reasoning is None or not isinstance(request.prompt, tuple):
        return verifier
    if request.structure is not None and not reasoning.starts_inside(prompt.tail):
        return verifier
    text = TextStream(tokenizer, (), reasoning, prompt.tail, start=prompt.start)
    closing = tokenizer.encode(reasoning.after, parse_special=True)
    return ReasoningLimit(verifier, text, request.max_reasoning, closing)
