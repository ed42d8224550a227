"""One generation: the loop's steps as events, with the text of the tokens and what was counted."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.marginal_cost import MarginalCost
from edgespec.core.logprobs import LogprobRecorder, TokenScore, score_text
from edgespec.core.loop import speculate
from edgespec.core.metrics import Meter
from edgespec.core.peers import Yield
from edgespec.core.protocols import Controller, FinishReason, PrefillProgress, Session, Step, Verifier
from edgespec.engine.events import Event, Finished, PrefixLoss, PromptScores, Request, Scored, TokenPrompt
from edgespec.engine.prefix_loss import EarlierText, explain_loss
from edgespec.engine.prompts import EncodedPrompt
from edgespec.engine.repetition import RepetitionDetector
from edgespec.engine.shown_scores import ShownScores
from edgespec.errors import InvalidRequest
from edgespec.text.reasoning import Channel, ReasoningFormat
from edgespec.text.stream import Piece, TextStream
from edgespec.text.tokenizer import Tokenizer, token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Generation:
    """The state of one request: its prompt, its tokens and their text, and why it ended.

    matcher  the request's grammar at its beginning, once it is compiled; None without one
    """

    def __init__(
        self,
        request: Request,
        encoded: EncodedPrompt,
        reasoning: ReasoningFormat | None,
        tokenizer: Tokenizer,
        started_s: float,
    ) -> None:
        """`started_s` is time.perf_counter() when the request arrived. Raises InvalidRequest for max_tokens below 0."""
        if request.max_tokens is not None and request.max_tokens < 0:
            raise InvalidRequest(f"max-tokens must be at least 0, not {request.max_tokens}.")
        self.request = request
        self.encoded = encoded
        self.reasoning = reasoning
        self.tokenizer = tokenizer
        self.matcher: LLMatcher | None = None
        self.seed = secrets.randbits(32) if request.seed is None else request.seed
        self.emitted: list[int] = []
        self.reason: FinishReason = "length"
        self._text = self.open_text(request.stop, is_raw=not isinstance(request.prompt, tuple))
        self._meter = Meter(len(encoded.tokens), started_s)
        self._pieces: list[tuple[list[Piece], bool]] = []  # of each token of the step under way, and `holds_stop` then
        self._scores = ShownScores()
        self._n_reasoning = 0  # tokens of it
        self._repetition = RepetitionDetector(request.repetition) if request.repetition is not None else None

    def open_text(self, stop: Sequence[str] = (), *, is_raw: bool = False) -> TextStream:
        """The text of the answer from its beginning. A raw prompt's is shown with its markers of reasoning."""
        start, tail = self.encoded.start, self.encoded.tail
        return TextStream(self.tokenizer, stop, self.reasoning, tail, self.request.visible, is_raw=is_raw, start=start)

    @property
    def starts_inside(self) -> bool:
        """Whether the prompt has begun the model's reasoning."""
        return self.reasoning is not None and self.reasoning.starts_inside(self.encoded.tail)

    def run(
        self,
        session: Session,
        controller: Controller,
        verifier: Verifier,
        costs: CostModel | None,
        settle: Callable[[], None],
    ) -> Iterator[Event | Yield]:
        """Generate on `session`: PromptScores if wanted, PrefillProgress, then Steps, each followed by its tokens'
        Pieces. If scores are wanted, those of the tokens in a Piece come before it. `settle` is called
        after each part of the prompt and each step.

        Raises Cancelled, BackendError.
        """
        request, ends = self.request, self.tokenizer.end_of_generation
        logprobs = LogprobRecorder(verifier, request.top_logprobs) if request.top_logprobs is not None else None
        if request.scores_prompt:
            scores = yield from score_text(session, self.encoded.tokens, request.top_logprobs or 0)
            first = self.encoded.tokens[0]
            is_shown = isinstance(request.prompt, TokenPrompt) or self.tokenizer.piece(first)
            first_bytes = token_bytes(self.tokenizer, first) if is_shown else None
            yield PromptScores(first_bytes, tuple(map(self._describe, scores)))
        phase: Channel = "answer"
        for event in speculate(
            session,
            controller,
            logprobs or verifier,
            self.encoded.tokens,
            max_tokens=session.capabilities.context_size if request.max_tokens is None else request.max_tokens,
            stop=ends,
            emit=self._emit,
            row_cost=partial(count_plain_steps, costs, session),
        ):
            if request.reports_steps or not isinstance(event, Step):
                yield event
            if isinstance(event, PrefillProgress):
                self._meter.add_progress(event, perf_counter())
                settle()
            elif isinstance(event, Step):
                self._meter.add(event, self._n_reasoning)
                scored = tuple(logprobs.last[: len(event.tokens)]) if logprobs is not None else ()
                for i, (pieces, holds_stop) in enumerate(self._pieces):
                    shown = [self._describe(each) for each in scored[i : i + 1] if each.token not in ends]
                    yield from self._scores.take(shown, pieces, holds_text=holds_stop)
                    yield from pieces
                self._pieces, self._n_reasoning = [], 0
                if self._text.channel != phase:
                    phase = self._text.channel
                    controller.set_phase(phase)
                settle()
        if self._text.stopped or ends.intersection(self.emitted[-1:]):
            self.reason = "stop"

    def finish(self) -> Iterator[Event]:
        """The text that was held back, and that of a step which was cancelled during its commit."""
        yield from chain.from_iterable(pieces for pieces, _ in self._pieces)
        pieces = self._text.finish()
        yield from self._scores.take((), pieces, holds_text=self._text.stopped)
        yield from pieces

    def finished(self) -> Finished:
        return Finished(self.reason, tuple(self.emitted), self.seed, self._meter.metrics(), self._text.stop)

    def explain_loss(self, earlier: Sequence[EarlierText], context_size: int) -> PrefixLoss | None:
        """Why a part of the prompt that `earlier` texts had was read again; None if that was not so."""
        if (reading := self._meter.reading) is None or self.request.scores_prompt:
            return None
        reused, request = reading.progress.reused, self.request
        return explain_loss(self.encoded.tokens, reused, earlier, request.prompt, self.tokenizer, context_size)

    def _emit(self, token: int, source: str) -> bool:
        """Add a token to the text; returns whether a stop string or a repetition ends it."""
        self.emitted.append(token)
        pieces = self._text.push(token, source)
        self._pieces.append((pieces, self._text.holds_stop))
        self._n_reasoning += self._text.channel == "reasoning"
        if self._repetition is not None and self._repetition.take(token):
            self.reason = "repetition"
        return self._text.stopped or self.reason == "repetition"

    def _describe(self, score: TokenScore) -> Scored:
        top = tuple((token_bytes(self.tokenizer, token), logprob) for token, logprob in score.top)
        return Scored(token_bytes(self.tokenizer, score.token), score.logprob, top)


def count_plain_steps(costs: CostModel | None, session: Session, n_drafted: int) -> float | None:
    """Plain steps that take as long as a forward with `n_drafted` nodes; None without `costs`.

    Both have the rows of other sessions beside them. With `costs` and `session` bound it is a core.loop.RowCost.
    """
    if costs is None:
        return None
    costs.move_to(session.position)
    rows = 1 + session.peers.rows
    return costs.seconds(rows + n_drafted) / costs.seconds(rows)


def time_rows(costs: CostModel | None, session: Session) -> Callable[[int], float]:
    """A function from this session's rows in a forward to their usual seconds; constant if nothing was measured."""
    if costs is None:
        return lambda rows: 1.0
    cost = MarginalCost(costs, lambda: session.peers)

    def seconds(rows: int) -> float:
        cost.begin_round(session.position)
        return cost.seconds(rows)

    return seconds
