"""Structured output: a grammar masks the target's logits, as a part of its distribution, so drafts change nothing.

The mask comes before all sampling. Verification reads masked distributions row by row, so a drafted token that breaks
the grammar has probability zero and is never accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgespec.backends.sequence import shared_prefix
from edgespec.core.protocols import Draft, Verdict, Verifier
from edgespec.core.sampling import Distribution, Logits, Sampler, SamplingParams
from edgespec.core.scores import Scores
from edgespec.engine.grammar_check_main import describe_fault
from edgespec.errors import BackendError, InvalidRequest, reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_DEPTH = 64
_SCALARS = (str, int, float, type(None))
_DIALECT = re.compile(r"https?://json-schema\.org/draft(-0[3467]|/20(19-09|20-12))/schema#?")
_IRREGULAR = re.compile(r"\(\?<?[=!]|\\[1-9kbB]")
_ESCAPE = re.compile(r"\\[^1-9kbB]", re.DOTALL)
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # their keys are names


def adapt_schema(schema: Any) -> tuple[Any, list[str]]:
    """(a copy of `schema` for llguidance; the rules that are left out of it, as sentences)

    Rewritten is only what would make llguidance refuse a common schema; what it cannot do it leaves out with a warning.
    Raises TypeError or ValueError for what is not JSON.
    """
    dropped: list[str] = []

    def is_irregular(pattern: str) -> bool:
        if found := _IRREGULAR.search(_ESCAPE.sub("", pattern)):
            dropped.append(f"the pattern {pattern[:100]!r} is not enforced: it has {found[0]}.")
        return found is not None

    def adapt(part: dict[str, Any]) -> dict[str, Any]:
        dialect, pattern, patterns, names = map(part.get, ("$schema", "pattern", "patternProperties", "propertyNames"))
        if isinstance(dialect, str) and not _DIALECT.fullmatch(dialect):
            del part["$schema"]  # it cannot be fetched
        if isinstance(pattern, str):
            part.pop("format", None)  # zod's pattern of a time contradicts the format, which demands a zone
            if is_irregular(pattern):
                del part["pattern"]
        if isinstance(patterns, dict) and (irregular := list(filter(is_irregular, patterns))):
            part["patternProperties"] = {name: rule for name, rule in patterns.items() if name not in irregular}
            part["additionalProperties"] = True
        if part.get("type") == "object" and isinstance(names, dict) and set(names) <= {"type", "title"}:
            del part["propertyNames"]  # any text
        return part

    def walk(part: Any, *, is_named: bool = False) -> Any:
        """Adapts `part`, where it `is_named` the schemas that it has by name; values that are constants stay."""
        if isinstance(part, list):
            return [walk(each) for each in part]
        if not isinstance(part, dict):
            return part
        if is_named:
            return {name: walk(each) for name, each in part.items()}
        return adapt(
            {
                key: each if key in ("const", "enum") else walk(each, is_named=key in _NAMED)
                for key, each in part.items()
            }
        )

    return walk(json.loads(json.dumps(schema))), list(dict.fromkeys(dropped))


_CONDITIONS = ("not", "if", "then", "else", "dependentSchemas")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", *_CONDITIONS)
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf")


def close_objects(schema: Any) -> None:
    """Forbid keys that are not declared in objects that declare some and say nothing of others.

    The schema admits any keys there, and small models write them until their limit. All objects of a schema stay open
    where the keys of one are declared in several places, such as in `allOf`, or in choices beside `properties`.
    """
    if not _is_scattered(schema):
        _close(schema)


def _is_scattered(part: Any) -> bool:
    """Whether what one value has to follow stands in several places."""
    if isinstance(part, list):
        return any(map(_is_scattered, part))
    if not isinstance(part, dict):
        return False
    places = sum(key in part for key in _ELSEWHERE) + ("properties" in part or "required" in part)
    return "allOf" in part or places > 1 or any(map(_is_scattered, part.values()))


def _close(part: Any, *, is_named: bool = False) -> None:
    """`is_named`: the values of `part` are schemas by name."""
    if isinstance(part, list):
        for each in part:
            _close(each)
    if not isinstance(part, dict):
        return
    declared = None if is_named else part.get("properties")
    skipped: tuple[str, ...] = () if is_named else ("const", "enum", *_CONDITIONS)
    is_closed = isinstance(declared, dict) and declared and not any(key in part for key in _OPEN)
    if is_closed and {*part.get("required", ())} <= {*(declared or ())}:
        part["additionalProperties"] = False
    for key, each in part.items():
        if key not in skipped:
            _close(each, is_named=not is_named and key in _NAMED)


def is_shallow(value: object, depth: int) -> bool:
    """Whether a JSON value is nested at most `depth` deep."""
    if isinstance(value, list | tuple):
        inner: Iterable[object] = value
    elif isinstance(value, Mapping):
        inner = value.values()
    else:
        return True
    return depth > 0 and all(isinstance(each, _SCALARS) or is_shallow(each, depth - 1) for each in inner)


_WHITESPACE = r"\x20?"  # between JSON tokens: models that may write more spend a third of their tokens on it
_EVERYTHING = 2**40


@dataclass(frozen=True, slots=True)
class Json:
    """JSON that follows `schema`, a JSON schema as text. `unenforced` names what is left out of it, in sentences."""

    schema: str
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text that follows a grammar in llguidance's Lark."""

    lark: str


Part = str | Json | Grammar
"""A str is literal text. Text that spells one control token stands for that token."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The grammar of an answer: one of several sequences of parts.

    first, last  the parts before and after it
    between      the parts between repeats, of which there may be 16; None where it is not repeated
    """

    alternatives: tuple[tuple[Part, ...], ...]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    between: tuple[str, ...] | None = None

    @property
    def unenforced(self) -> tuple[str, ...]:
        """What was left out of the schemas, in sentences; the compiler may leave out more."""
        parts = (part for parts in self.alternatives for part in parts if isinstance(part, Json))
        return tuple(dict.fromkeys(each for part in parts for each in part.unenforced))


def json_part(schema: Any, *, is_strict: bool = False) -> Json:
    """Raises InvalidRequest for a schema that is no JSON or nested too deep. The engine refuses one that it cannot
    enforce as a whole if `is_strict`; else it names what it leaves out, see Finished.
    """
    if not is_shallow(schema, MAX_DEPTH):
        raise InvalidRequest(f"the JSON schema is nested more than {MAX_DEPTH} deep.", hint="Simplify it.")
    try:
        adapted, dropped = adapt_schema(schema)
        close_objects(adapted)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the JSON schema cannot be read: {error}.", hint="Check the schema.") from error
    if isinstance(adapted, dict):
        options = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": not is_strict, "lenient": not is_strict}
        adapted["x-guidance"] = options
    text = json.dumps(adapted)
    if is_strict and dropped:
        raise InvalidRequest(
            f"strict is true, but the schema cannot be enforced: {dropped[0]}",
            hint="Remove strict, or change the schema.",
        )
    return Json(text, tuple(dropped))


def json_structure(schema: Any = None, *, is_strict: bool = False) -> Structure:
    """JSON that follows `schema`, or any object without one; see `json_part`. Raises InvalidRequest."""
    return Structure(((json_part({"type": "object"} if schema is None else schema, is_strict=is_strict),),))


def grammar_structure(text: str) -> Structure:
    """Text that follows a grammar in GBNF, which llama.cpp reads, or in llguidance's Lark. Raises InvalidRequest."""
    if "::=" not in text:
        return Structure(((Grammar(text),),))
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = gbnf_to_lark(text)
    except Exception as error:
        fault = reason_of(error).partition(", '")[0]  # without an excerpt
        raise InvalidRequest(f"the grammar cannot be read: {fault[:200]}.", hint="Correct it.") from error
    return Structure(((Grammar(lark.removeprefix("%llguidance {}")),),))


def regex_structure(pattern: str) -> Structure:
    """Text of which the whole matches a regular expression."""
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if inner.endswith("$") and not inner.endswith("\\$") else inner
    escaped = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), inner)
    return Structure(((Grammar(f"start: /(?:{escaped})/"),),))


def either(one: Structure, other: Structure) -> Structure:
    """An answer of the one structure or of the other, not repeated."""
    return Structure(
        tuple((*each.first, *alternative, *each.last) for each in (one, other) for alternative in each.alternatives)
    )


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
        """The distribution after `prefix`. Raises InvalidRequest where the grammar becomes too complex."""
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

        Raises BackendError where the grammar forbids `prefix`.
        """
        self.require(prefix[self.start :])
        tokens = self._matcher.compute_ff_tokens()
        return tokens[: self._matcher.validate_tokens(tokens)]

    def require(self, answer: Sequence[int]) -> None:
        """Check the emitted tokens `answer`, which begin where the structure does and do not end the generation.

        Raises BackendError where the grammar forbids one: what follows could not be constrained.
        """
        if not self._advance(list(answer)):
            raise _forbidden(f"token {answer[len(self._consumed)]}")

    def require_end(self, answer: Sequence[int], end: int) -> None:
        """Check also that the token `end` may end the generation after `answer`."""
        self.require(answer)
        if not self._matcher.is_accepting() and not self._matcher.validate_tokens([end]):
            raise _forbidden("an early end")

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
            raise InvalidRequest(message, hint="Simplify it.")


def _forbidden(what: str) -> BackendError:
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
