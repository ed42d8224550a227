"""Conversations that a model writes by itself, for drafts to learn from: its own questions, and its answers to them.

A draft learns most from what its target says. A chat model whose prompt ends where a user's turn begins goes on with a
question (Magpie, Xu et al. 2024, arXiv:2406.08464), so that no data set is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edgespec.cancel import check_cancelled, current_check, iterate
from edgespec.core.peers import Yield
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.errors import Cancelled, ContextOverflow, DraftRefused, reading
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece
from edgespec.train.texts import TrainingText

_MAX_QUESTION, _MAX_ANSWER = 192, 384  # tokens
_MIN_QUESTION = 8  # characters
_GREEDY_SHARE = 0.3  # of the answers; the others are drawn
_DRAWN, _GREEDY = SamplingParams(temperature=0.8), SamplingParams(temperature=0)
_QUESTION = SamplingParams(temperature=1.0, top_p=0.95)
_MARK = "QUESTION-STARTS-HERE"
_GRAM, _LOOP = 4, 16  # tokens; an answer ends before it repeats so many n-grams behind each other


@dataclass(frozen=True, slots=True)
class Conversation:
    """The tokens of a question and its answer, of which the first `n_prompt` are the prompt's.

    seed      its number
    question  the text of a question that the user has given; "" for one of the model's own
    """

    seed: int
    n_prompt: int
    tokens: list[int]
    question: str = ""


class ConversationFile:
    """Conversations in a file of JSON lines, for its owner only. Damaged lines are left out."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Read what is there, and cut the line that a killed process has not finished. Raises CacheError."""
        self._path = path
        with reading(path):
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            if lines and not lines[-1].endswith(b"\n"):
                os.truncate(path, sum(map(len, lines[:-1])))
        read = (_parse(line, vocab_size) for line in lines)
        self.conversations = [each for each in read if each is not None]
        self.n_tokens = sum(len(each.tokens) - each.n_prompt for each in self.conversations)  # of all answers

    @property
    def next_seed(self) -> int:
        return 1 + max((each.seed for each in self.conversations), default=-1)

    def add(self, conversation: Conversation) -> None:
        """Append one. Raises CacheError."""
        with reading(self._path, "cannot be written", "Free some space and start again: it goes on from here."):
            self._path.touch(0o600)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(conversation)) + "\n")
        self.conversations.append(conversation)
        self.n_tokens += len(conversation.tokens) - conversation.n_prompt

    def list_unanswered(self, questions: Sequence[str]) -> list[str]:
        """Those of `questions` that no conversation answers, each once."""
        answered = {each.question for each in self.conversations}
        return [question for question in dict.fromkeys(questions) if question not in answered]

    def texts(self) -> list[TrainingText]:
        """All of them, as texts to train on; their prompts are context alone."""
        return [
            TrainingText(np.array(each.tokens, np.int32), each.n_prompt, each.n_prompt, f"own:{each.seed}")
            for each in self.conversations
        ]


def _parse(line: bytes, vocab_size: int) -> Conversation | None:
    """The conversation in a line; None for a damaged one."""
    try:
        found = Conversation(**json.loads(line))
        is_whole = all(type(token) is int and 0 <= token < vocab_size for token in found.tokens)
        return found if is_whole and 0 < found.n_prompt < len(found.tokens) and found.seed >= 0 else None
    except (ValueError, TypeError, RecursionError):
        return None


def write_conversations(
    engine: Engine, questions: Sequence[str], first: int, n_streams: int
) -> Generator[Conversation | None]:
    """Conversations from number `first` on, `n_streams` written at a time; they end when the caller stops. None follows
    each forward, so that the caller can stop in time.

    The first ones answer `questions`; for the others the model writes a question. Raises Cancelled, BackendError, and
    DraftRefused if it writes none.
    """
    turn_start, left = _find_turn_start(engine), list(questions)
    running: list[Generator[Yield, None, Conversation | None]] = []
    seed, n_failed = first, 0
    while True:
        while len(running) < n_streams:
            question = left.pop(0) if left else ""
            running.append(_converse(engine, turn_start, question, seed))
            seed += 1
        for each in tuple(running):
            try:
                next(each)
            except StopIteration as ended:
                running.remove(each)
                n_failed = 0 if ended.value else n_failed + 1
                if ended.value:
                    yield ended.value
        yield None
        if n_failed > 8 * n_streams:
            raise DraftRefused(
                "the model writes no questions and answers to learn from.",
                hint='Give it questions: --texts FILE, with a line such as {"prompt": "..."} for each.',
            )


def _find_turn_start(engine: Engine) -> str:
    """The prompt that ends where the user's first turn begins. Raises TemplateError, DraftRefused for a base model."""
    before, mark, _ = engine.prompts.render((Message("user", _MARK),)).partition(_MARK)
    if not mark or not before:
        raise DraftRefused(
            "the model has no chat template, so that it cannot write questions to learn from.",
            hint="`edgespec adapt` trains a draft model on what the model has answered.",
        )
    return before


def _converse(engine: Engine, turn_start: str, given: str, seed: int) -> Generator[Yield, None, Conversation | None]:
    """A conversation; None without a question, for a question that does not fit, and for an answer of a few tokens."""
    try:
        question = given
        if not given:
            question, _ = yield from _write(engine, Request(turn_start, _QUESTION, _MAX_QUESTION, seed))
            if len(question.strip()) < _MIN_QUESTION:
                return None
        prompt = (Message("user", question.strip()),)
        sampling = _GREEDY if np.random.default_rng(seed).random() < _GREEDY_SHARE else _DRAWN
        _, answer = yield from _write(engine, Request(prompt, sampling, _MAX_ANSWER, seed))
        before = engine.encode(prompt)
    except ContextOverflow:
        return None
    return Conversation(seed, len(before), [*before, *answer], given) if len(answer) > _LOOP else None


def _write(engine: Engine, request: Request) -> Generator[Yield, None, tuple[str, Sequence[int]]]:
    """(text, tokens) of an answer, which ends where it begins to repeat itself. Raises Cancelled."""
    text, tokens, is_looping = "", list[int](), False
    check = current_check()

    def stop() -> None:
        check()
        if is_looping:
            raise Cancelled

    for event in iterate(engine.generate(request), stop):
        if isinstance(event, Yield):
            yield event
        elif isinstance(event, Piece):
            text += event.text
        elif isinstance(event, Step):
            tokens += event.tokens
            is_looping = len(tokens) % _LOOP == 0 and len(cut_loop(tokens)) < len(tokens)
    check_cancelled()
    return text, cut_loop(tokens)


def cut_loop(tokens: Sequence[int]) -> Sequence[int]:
    """`tokens` up to where they begin to repeat themselves: any draft predicts all of a loop, and learns nothing from
    it.
    """
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(_GRAM, len(tokens) + 1):
        gram = tuple(tokens[end - _GRAM : end])
        repeated = repeated + 1 if gram in seen else 0
        if repeated == _LOOP:
            return tokens[: end - _LOOP]
        seen.add(gram)
    return tokens
