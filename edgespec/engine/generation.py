"""One generation: the loop's steps as events, with the text of the tokens and what was counted."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from itertools import chain
from time import perf_counter

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.cost_model import CostModel
from edgespec.core.batching import Yield
from edgespec.core.logprobs import LogprobRecorder, TokenScore, score_text
from edgespec.core.loop import speculate
from edgespec.core.metrics import Meter
from edgespec.core.protocols import CheckCancelled, Controller, FinishReason, PrefillProgress, Session, Step, Verifier
from edgespec.engine.events import Event, Finished, PromptScores, Request, Scored, TokenPrompt
from edgespec.errors import InvalidRequest
from edgespec.text.reasoning import Channel
from edgespec.text.stream import Piece, TextStream
from edgespec.text.tokenizer import Tokenizer


class Generation:
    """The state of one request: its prompt, its tokens and their text, and why it ended."""

    def __init__(
        self, request: Request, prompt: list[int], text: TextStream, tokenizer: Tokenizer, started_s: float
    ) -> None:
        """`started_s` is time.perf_counter() when the request arrived. Raises InvalidRequest for max_tokens below 0."""
        if request.max_tokens is not None and request.max_tokens < 0:
            raise InvalidRequest(f"max-tokens must be at least 0, not {request.max_tokens}.", hint="Give a larger one.")
        self.request = request
        self.prompt = prompt
        self.seed = secrets.randbits(32) if request.seed is None else request.seed
        self.emitted: list[int] = []
        self.reason: FinishReason = "length"
        self._text = text
        self._tokenizer = tokenizer
        self._meter = Meter(len(prompt), started_s)
        self._pieces: list[list[Piece]] = []  # of each token of the step under way
        self._n_reasoning = 0  # tokens of it

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._text.stop

    def run(
        self, session: Session, controller: Controller, verifier: Verifier, costs: ForwardCost, check: CheckCancelled
    ) -> Iterator[Event | Yield]:
        """Generate on `session`: PromptScores if wanted, PrefillProgress, then Steps, each followed by its tokens'
        Pieces. If scores are wanted, that of a token comes before its Pieces.

        Raises Cancelled, BackendError.
        """
        request, ends = self.request, self._tokenizer.end_of_generation
        logprobs = LogprobRecorder(verifier, request.top_logprobs) if request.top_logprobs is not None else None
        if request.scores_prompt:
            scores = yield from score_text(session, self.prompt, request.top_logprobs or 0, check)
            first = self.prompt[0]
            is_shown = isinstance(request.prompt, TokenPrompt) or self._tokenizer.piece(first)
            yield PromptScores(self._read(first) if is_shown else None, tuple(map(self._spell, scores)))
        phase: Channel = "answer"
        for event in speculate(
            session,
            controller,
            logprobs or verifier,
            self.prompt,
            max_tokens=session.capabilities.context_size if request.max_tokens is None else request.max_tokens,
            stop=ends,
            emit=self._emit,
            row_cost=costs.plain_steps,
            check=check,
        ):
            if request.reports_steps or not isinstance(event, Step):
                yield event
            if isinstance(event, PrefillProgress):
                self._meter.add_progress(event, perf_counter())
            elif isinstance(event, Step):
                self._meter.add(event, self._n_reasoning)
                scored = logprobs.take(len(event.tokens)) if logprobs is not None else ()
                for i, pieces in enumerate(self._pieces):
                    yield from map(self._spell, scored[i : i + 1])
                    yield from pieces
                self._pieces, self._n_reasoning = [], 0
                if self._text.channel != phase:
                    phase = self._text.channel
                    controller.set_phase(phase)
        if self._text.stopped or ends.intersection(self.emitted[-1:]):
            self.reason = "stop"

    def finish(self) -> Iterator[Event]:
        """The text that was held back, and that of a step which was cancelled during its commit."""
        yield from chain.from_iterable(self._pieces)
        yield from self._text.finish()

    def finished(self) -> Finished:
        return Finished(self.reason, tuple(self.emitted), self.seed, self._meter.metrics(), self.stop)

    def _emit(self, token: int, source: str) -> bool:
        """Take a token into the text; returns whether a stop string ends it."""
        self.emitted.append(token)
        self._pieces.append(self._text.push(token, source))
        self._n_reasoning += self._text.channel == "reasoning"
        return self._text.stopped

    def _spell(self, score: TokenScore) -> Scored:
        top = tuple((self._read(token), logprob) for token, logprob in score.top)
        return Scored(self._read(score.token), score.logprob, top)

    def _read(self, token: int) -> bytes:
        return self._tokenizer.piece(token) or self._tokenizer.special_text(token).encode()


class ForwardCost:
    """Usual seconds of a session's forwards, beside the sessions that share them now."""

    def __init__(self, costs: CostModel | None, session: Session) -> None:
        """`costs` is None where nothing has been measured."""
        self._costs = costs
        self._session = session

    def plain_steps(self, n_drafted: int) -> float | None:
        """The core.loop.RowCost of this session, beside the rows that the others have in the forward."""
        if self._costs is None:
            return None
        self._costs.move_to(self._session.position)
        rows = 1 + self._session.peers.rows
        return self._costs.seconds(rows + n_drafted) / self._costs.seconds(rows)

    def seconds_by_rows(self) -> Callable[[int], float]:
        """Forward time by number of rows of this session; constant where nothing has been measured."""
        if self._costs is None:
            return lambda rows: 1.0
        cost = MarginalCost(self._costs, lambda: self._session.peers)

        def seconds(rows: int) -> float:
            cost.begin_round(self._session.position)
            return cost.seconds(rows)

        return seconds
