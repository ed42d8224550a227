"""Structured output: what tokens a grammar leaves open, as a part of the target's law, so that drafts change nothing.

A structure masks the target's logits before anything else is done to them. Verification reads masked laws row by row,
so a drafted token that breaks the structure has probability zero and is never accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgespec.backends.sequence import shared_prefix
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Budget, Controller, Decision, Draft, Step, Verdict
from edgespec.core.sampling import Distribution, Sampler, SamplingParams
from edgespec.core.scores import Scores
from edgespec.errors import InvalidRequest
from edgespec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_SCHEMA = 2**18  # characters
_DEEPEST = 64
_WHITESPACE = r"[\x20\x0A\x09]{0,24}"  # between JSON's tokens; without a bound a model may write blanks for ever
_MOST = 16  # of what there may be several
_FORCED = 16  # tokens that a structure leaves no choice about, proposed at once
_WINDOW = 16  # tokens that the end of the reasoning may be spelled in
_EVERYTHING = 2**40


@dataclass(frozen=True, slots=True)
class Text:
    """Something that has to be there as it is. What is the spelling of one control token stands for that token."""

    text: str


@dataclass(frozen=True, slots=True)
class Json:
    """JSON that follows a schema, which is given as text."""

    schema: str


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer has to be: one of several sequences of parts.

    first, last  what is before and after it
    between      what is between it and another one, where there may be up to 16; None where there is one
    """

    alternatives: tuple[tuple[Text | Json, ...], ...]
    first: tuple[Text, ...] = ()
    last: tuple[Text, ...] = ()
    between: tuple[Text, ...] | None = None


def texts(parts: Iterable[str]) -> tuple[Text, ...]:
    return tuple(Text(part) for part in parts)


def json_part(schema: Any) -> Json:
    """Raises InvalidRequest for what is too large or too deep to be looked at."""
    try:
        if not is_shallow(schema, _DEEPEST):
            raise InvalidRequest(f"the JSON schema is nested more than {_DEEPEST} deep.", hint="Simplify it.")
        if isinstance(schema, Mapping):
            schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
        text = json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the JSON schema cannot be read: {error}.", hint="Check the schema.") from error
    if len(text) > _MOST_SCHEMA:
        raise InvalidRequest(f"the JSON schema has more than {_MOST_SCHEMA:,} characters.", hint="Simplify it.")
    return Json(text)


def json_structure(schema: Any = None) -> Structure:
    """JSON that follows `schema`; None: any object. Raises InvalidRequest."""
    return Structure(((json_part({"type": "object"} if schema is None else schema),),))


def either(one: Structure, other: Structure) -> Structure:
    """An answer of one kind or of the other, of which there may be no several."""
    return Structure(tuple((*each.first, *way, *each.last) for each in (one, other) for way in each.alternatives))


class GrammarCompiler:
    """GrammarCompiler over one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def constrain(self, structure: Structure, sampler: Sampler, prompt_length: int, after: bytes = b"") -> GrammarMask:
        """`sampler` within `structure`, which holds from the end of the prompt, or from the first `after` on.

        Raises InvalidRequest for a structure that cannot be followed.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(self._lark(structure)))
        if matcher.is_error():
            why = " ".join(matcher.get_error().split())[:300].rstrip(".")
            raise InvalidRequest(f"the answer's structure cannot be followed: {why}.", hint="Simplify the schema.")
        return GrammarMask(matcher, sampler, self._tokenizer, prompt_length, after)

    def _lark(self, structure: Structure) -> str:
        rules: list[str] = []

        def sequence(parts: Sequence[Text | Json]) -> str:
            names = [f"part{len(rules)}x{i}" for i in range(len(parts))]
            rules.extend(f"{name}: {self._rule(part)}" for name, part in zip(names, parts, strict=True))
            return " ".join(names)

        ways = " | ".join(sequence(parts) for parts in structure.alternatives)
        more = "" if structure.between is None else f"more{{0,{_MOST - 1}}}"
        start = f"start: {sequence(structure.first)} way {more} {sequence(structure.last)}"
        another = f"more: {sequence(structure.between or ())} way"
        return "\n".join([start, f"way: {ways}", *([another] if more else ()), *rules])

    def _rule(self, part: Text | Json) -> str:
        if isinstance(part, Json):
            return f"%json {part.schema}"
        tokens = self._tokenizer.encode(part.text, parse_special=True)
        if len(tokens) == 1 and not self._tokenizer.piece(tokens[0]):
            return f"<[{tokens[0]}]>"
        return json.dumps(part.text)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(self._tokenizer.end_of_generation)
        if not ends:
            raise InvalidRequest("this model has no token to end a structured answer with.", hint="Use another model.")
        return LLTokenizer(TokenizerWrapper(_Spelled(self._tokenizer)), eos_token=ends)


class _Spelled:
    """A vocabulary as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        ends = tokenizer.end_of_generation
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece or token in ends]
        special = frozenset(self.special_token_ids)
        self.tokens = [b"<|%d|>" % token if token in special else piece for token, piece in enumerate(pieces)]
        self.bos_token_id = tokenizer.bos
        self.eos_token_id = min(ends)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", errors="replace"), parse_special=False)


class GrammarMask:
    """The law of a sampler, without the tokens that the structure forbids. A LawSource."""

    window = _EVERYTHING
    is_argmax = False
    row_params: SamplingParams | None = None

    def __init__(
        self, matcher: LLMatcher, sampler: Sampler, tokenizer: Tokenizer, prompt_length: int, after: bytes
    ) -> None:
        self._matcher = matcher
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._start = prompt_length
        self._after = after
        self._consumed: list[int] = []
        self._ends = sorted(tokenizer.end_of_generation)
        self._begin: int | None = None if after else 0  # of the structure, counted from the prompt's end

    def distribution(self, logits: Logits, prefix: Sequence[int]) -> Distribution:
        """Raises InvalidRequest where the grammar becomes too complex to follow."""
        if not self._follow(prefix):
            if self._begin is None:  # what is to follow the reasoning has to follow
                logits = logits.copy()
                logits[self._ends] = -np.inf
        else:
            z = np.full(len(logits), -np.inf, np.float32)
            allowed = self._allowed()
            z[: len(allowed)][allowed] = logits[: len(allowed)][allowed]
            logits = z
        return self._sampler.distribution(logits, prefix)

    def forced(self, prefix: Sequence[int]) -> list[int]:
        """Tokens that have to follow `prefix`, spelled as the vocabulary would."""
        return self._matcher.compute_ff_tokens() if self._follow(prefix) else []

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """[vocab_size] whether a token may come next."""
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        self._require_sound()
        return allowed[: self._tokenizer.vocab_size]

    def _follow(self, prefix: Sequence[int]) -> bool:
        """Bring the grammar to the end of `prefix`; whether it holds there."""
        answer = list(prefix[self._start :])
        if self._begin is None or (self._after and not self._ends_reasoning(answer, self._begin)):
            recent = range(max(1, len(answer) - 128), len(answer) + 1)
            self._begin = next((end for end in recent if self._ends_reasoning(answer, end)), None)
            if self._begin is None:
                return False
        wanted = answer[self._begin :]
        common = shared_prefix(self._consumed, wanted, len(wanted))
        if len(self._consumed) > common:
            self._matcher.rollback(len(self._consumed) - common)
        taken = self._matcher.try_consume_tokens(wanted[common:]) if len(wanted) > common else 0
        self._consumed = wanted[: common + taken]
        self._require_sound()
        # Rules that look at all of a draft ask for laws beyond a token that the structure forbids. Such a token is
        # never accepted, so that any law will do.
        return len(self._consumed) == len(wanted)

    def _ends_reasoning(self, answer: list[int], end: int) -> bool:
        """Whether the token before `end` completes what the structure waits for."""
        if not 0 < end <= len(answer):
            return False
        text = self._text(answer[max(0, end - _WINDOW) : end])
        return self._after in text and self._after not in self._text(answer[max(0, end - _WINDOW) : end - 1])

    def _text(self, tokens: Sequence[int]) -> bytes:
        spell = self._tokenizer
        return b"".join(spell.piece(token) or spell.special_text(token).encode() for token in tokens)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            why = " ".join(self._matcher.get_error().split())[:300].rstrip(".")
            raise InvalidRequest(
                f"the answer's structure is too complex to follow: {why}.", hint="Simplify the schema."
            )


class JumpForward:
    """Another controller; where the structure leaves no choice, what it forces is proposed in place of a draft: as much
    of it as is fastest by `seconds` of a forward by its rows.
    """

    def __init__(
        self,
        controller: Controller,
        forced: Callable[[Sequence[int]], list[int]],
        seconds: Callable[[int], float],
    ) -> None:
        self._controller = controller
        self._forced = forced
        self._seconds = seconds
        self._is_ours = False
        self.decision = controller.decision
        self.expects_plain = False

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._controller.begin(prompt, scores)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        forced = self._forced(tokens)[: min(_FORCED, limit.depth, limit.nodes)]
        forced = forced[: max(range(len(forced) + 1), key=lambda n: (n + 1) / self._seconds(n + 1))]
        self._is_ours = len(forced) > 0
        if not self._is_ours:
            draft = self._controller.propose(tokens, limit)
            self.decision = self._controller.decision
            return draft
        self._controller.propose(tokens, Budget(0, 0))
        self.decision = Decision("structure", "the structure leaves no choice", len(forced) + 1.0)
        return Draft.chain(forced)

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        if not self._is_ours:
            self._controller.observe(verdict, scores)

    def record(self, step: Step) -> None:
        if not self._is_ours:
            self._controller.record(step)

    def set_phase(self, phase: str) -> None:
        self._controller.set_phase(phase)

    def warning(self) -> str | None:
        return self._controller.warning()

    def end(self) -> None:
        self._controller.end()


def is_shallow(value: object, depth: int) -> bool:
    """Whether JSON is nested no deeper than `depth`."""
    if isinstance(value, Mapping):
        return depth > 0 and all(is_shallow(each, depth - 1) for each in value.values())
    if isinstance(value, list | tuple):
        return depth > 0 and all(is_shallow(each, depth - 1) for each in value)
    return True
