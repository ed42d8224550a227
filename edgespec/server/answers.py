"""Writers, which turn the parts of the answers to a request into an interface's events and its whole response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from edgespec.answers.response import CUT, Done, Part, ReasoningDelta, Started, TextDelta, new_id
from edgespec.engine.events import Scored
from edgespec.text.tool_calls import CallDelta, CallEnd, CallStart

Event = dict[str, Any]


@dataclass(slots=True)
class Block:
    """A stretch of an answer: reasoning, text, or a call with its arguments as `text`. `number` is the index of the
    call in the answer. `written_id` is the id that the model wrote for a call, by which it will know the result; "" if
    it wrote none. `scores` are the logprobs of a text's tokens, if a Writer assigns them.
    """

    kind: Literal["reasoning", "text", "call"]
    name: str = ""
    number: int = 0
    text: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    scores: list[dict[str, Any]] = field(default_factory=list)
    id: str = field(default_factory=lambda: new_id(""))
    written_id: str = ""

    def call_id(self, prefix: str = "call_") -> str:
        return self.written_id or prefix + self.id


Step = Started | tuple[Literal["begin", "grow", "close"], Block, str] | Done
"""What happens to an answer: it begins, one of its blocks begins, grows by a text or is closed, or it has ended."""


@dataclass(slots=True)
class Answer:
    """What has arrived of one answer. `scores`: the logprobs of its tokens; `end`: None until it has ended."""

    blocks: list[Block] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    end: Done | None = None

    def join(self, *kinds: str) -> str:
        return "".join(block.text for block in self.blocks if block.kind in kinds)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    def add(self, part: Part) -> Iterator[Step]:
        """Add the next part, and yield the steps that it causes."""
        match part:
            case Started():
                yield part
            case TextDelta(text):
                yield from self._grow(Block("text"), text)
            case ReasoningDelta(text):
                yield from self._grow(Block("reasoning"), text)
            case CallStart(number, name, written_id):
                is_new = all(block.written_id != written_id for block in self.blocks)
                yield from self._begin(Block("call", name, number, written_id=written_id if is_new else ""))
            case CallDelta(arguments=text):
                yield from self._grow(self.blocks[-1], text)
            case CallEnd(call=call, is_cut=is_cut):
                self.blocks[-1].text = call.arguments
                yield from self._close(is_cut=is_cut)
            case Scored():
                self.scores.append(format_score(part))
            case Done():
                yield from self._close(is_cut=part.reason in CUT)
                self.end = part
                yield part

    def _grow(self, block: Block, text: str) -> Iterator[Step]:
        """Append text to the last block, or to the new `block` if that is of another kind."""
        if not self.blocks or self.blocks[-1].kind != block.kind:
            yield from self._begin(block)
        self.blocks[-1].text += text
        yield "grow", self.blocks[-1], text

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._close()
        self.blocks.append(block)
        yield "begin", block, ""

    def _close(self, *, is_cut: bool = False) -> Iterator[Step]:
        """End the last block, unless it has ended. `is_cut`: it is not complete."""
        if self.blocks and self.blocks[-1].status == "in_progress":
            self.blocks[-1].status = "incomplete" if is_cut else "completed"
            yield "close", self.blocks[-1], ""


class Writer(ABC):
    """Keeps the answers to one request by index. A subclass turns their steps into the events of one interface."""

    last = b""
    """What is sent at the end of a stream, behind its events."""

    def __init__(self) -> None:
        self.answers: defaultdict[int, Answer] = defaultdict(Answer)
        self._n_sent: defaultdict[int, int] = defaultdict(int)  # scores of each answer in events so far

    def events(self, index: int, part: Part) -> Iterator[Event]:
        """Yield the events of `part` of the answer with this index. The parts of one answer must come in order."""
        for step in self.answers[index].add(part):
            yield from self.write(index, step)

    @abstractmethod
    def write(self, index: int, step: Step) -> Iterator[Event]:
        """Yield the events of one step of the answer with this index."""

    def take_scores(self, index: int) -> list[dict[str, Any]]:
        """Return the logprobs that have arrived since the last call, of the tokens whose text is about to be sent."""
        scores = self.answers[index].scores
        start, self._n_sent[index] = self._n_sent[index], len(scores)
        return scores[start:]

    def finish(self) -> Iterable[Event]:
        """The events after all answers."""
        return ()

    def fail(self, error: Event) -> Iterable[Event]:
        """The last events of a stream that fails. `error` is the body that a response without a stream would have."""
        return (error,)

    @abstractmethod
    def response_body(self) -> dict[str, Any]:
        """The body of a response that is not streamed, once all parts have gone through `events`."""


_MIN_LOGPROB = -9999.0  # OpenAI's value for -inf, which JSON cannot hold


def format_score(score: Scored) -> dict[str, Any]:
    """The logprobs of one token in the form of /v1/chat/completions."""
    top = [_format_token(text, logprob) for text, logprob in score.top]
    return {**_format_token(score.text, score.logprob), "top_logprobs": top}


def _format_token(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode("utf-8", "replace"), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(text)}


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call, for interfaces in which they are an object.

    Arguments that were cut end with their last complete value, as Anthropic's client reads them. For text that is not
    JSON this is {"INVALID_JSON": text}, as in Anthropic's documentation.
    """
    try:
        value = from_json(text or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
