"""Structured output: a grammar masks the target's logits, as a part of its distribution, so drafts change nothing.

The mask comes before all sampling. Verification reads masked distributions row by row, so a drafted token that breaks
the grammar has probability zero and is never accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgespec.backends.sequence import shared_prefix
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Draft, Verdict, Verifier
from edgespec.core.sampling import Distribution, Sampler, SamplingParams
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
        dialect, pattern, patterns = map(part.get, ("$schema", "pattern", "patternProperties"))
        if isinstance(dialect, str) and not _DIALECT.fullmatch(dialect):
            del part["$schema"]  # it cannot be fetched
        if isinstance(pattern, str):
            part.pop("format", None)  # zod's pattern of a time contradicts the format, which demands a zone
            if is_irregular(pattern):
                del part["pattern"]
        if isinstance(patterns, dict) and (irregular := list(filter(is_irregular, patterns))):
            part["patternProperties"] = {name: rule for name, rule in patterns.items() if name not in irregular}
            part["additionalProperties"] = True
        if isinstance(names := part.get("propertyNames"), dict):
            named = find_reference(root, names.get("$ref"))
            _write_names(part, adapt(dict(named)) if isinstance(named, dict) and named.keys() <= _SIMPLE else names)
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

    root = json.loads(json.dumps(schema))
    return walk(root), list(dict.fromkeys(dropped))


_LENGTHS = {"minLength", "maxLength"}
_NOTES = {"title", "description", "examples"}
_SIMPLE = {"type", "enum", "const", "pattern", "format", *_LENGTHS, *_NOTES}  # they have no schemas in them
_MAX_NAME = 256  # characters of names whose length is bounded


def _write_names(part: dict[str, Any], names: dict[str, Any]) -> None:
    """Write the rules of `propertyNames`, which llguidance does not read, as properties or as a pattern of them.

    What has no such form stays, and llguidance names it.
    """
    declared, others = part.get("properties", {}), part.get("additionalProperties", True)
    rules = names.keys() - {"type"} - _NOTES
    if names.get("type", "string") != "string" or "patternProperties" in part or not isinstance(declared, dict):
        return
    if (listed := _list_strings(names)) is not None:
        part["properties"] = {
            name: declared.get(name, others) for name in listed if name in declared or others is not False
        }
    elif rules and not declared and (pattern := _make_pattern(names, rules)) is not None:
        part["patternProperties"] = {pattern: others}
    elif rules:
        return
    if rules:
        part["additionalProperties"] = False
    del part["propertyNames"]


def _list_strings(schema: Any) -> list[str] | None:
    """The strings that a schema lists; None where it does anything else."""
    if not isinstance(schema, dict) or len(rules := schema.keys() - {"type"} - _NOTES) != 1:
        return None
    match rules.pop(), schema:
        case "const", {"const": str(value)}:
            return [value]
        case "enum", {"enum": list(values)}:
            return [value for value in values if isinstance(value, str)]
        case "anyOf", {"anyOf": list(choices)}:
            listed = [_list_strings(choice) for choice in choices]
            return (
                [value for each in listed for value in each or ()] if all(each is not None for each in listed) else None
            )
    return None


def _make_pattern(names: dict[str, Any], rules: set[str]) -> str | None:
    """The regular expression of names with a pattern, or of a length."""
    if rules == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    bounds = [each for each in (least, most) if each != ""]
    if rules <= _LENGTHS and all(type(each) is int and 0 <= each <= _MAX_NAME for each in bounds):
        return f"^(?s:.{{{least},{most}}})$"
    return None


def find_reference(root: Any, reference: Any) -> Any:
    """What a reference to another place in the schema `root` leads to; None where it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        name = key.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


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


def _close_arguments(schema: dict[str, Any]) -> None:
    """Forbid any keys in a tool's arguments where its schema declares none and says nothing of others.

    Such a tool takes no arguments; small models would write some until their limit.
    """
    says = ("propertyNames", "minProperties", "enum", "const", *_OPEN, *_ELSEWHERE)
    if not (schema.get("properties") or schema.get("required") or any(key in schema for key in says)):
        schema["additionalProperties"] = False


def _move_references(part: Any, base: str) -> Any:
    """A copy of a schema whose references hold when its root is at `base`, such as "#/properties/arguments".

    Those below an `$id` of their own start there.
    """
    if isinstance(part, list):
        return [_move_references(each, base) for each in part]
    if not isinstance(part, dict) or isinstance(part.get("$id"), str):
        return part
    moved = {key: each if key in ("const", "enum") else _move_references(each, base) for key, each in part.items()}
    target = part.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = base + target[1:]
    return moved


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


@dataclass(frozen=True, slots=True)
class Either:
    """One of several sequences of parts."""

    alternatives: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class Maybe:
    """A sequence of parts, or nothing."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to the first `end`, which is a part of it. `pattern`: regular expression of the text before."""

    end: str
    pattern: str = "(?s:.*)"


Part = str | Json | Grammar | Either | Maybe | Until
"""A str is literal text; what in it spells a control token stands for that token."""


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
        parts = (part for parts in self.alternatives for part in _find_json(parts))
        return tuple(dict.fromkeys(each for part in parts for each in part.unenforced))


def _find_json(parts: Iterable[Part]) -> Iterator[Json]:
    for part in parts:
        if isinstance(part, Json):
            yield part
        elif isinstance(part, Maybe):
            yield from _find_json(part.parts)
        elif isinstance(part, Either):
            for alternative in part.alternatives:
                yield from _find_json(alternative)


def json_part(schema: Any, *, is_strict: bool = False) -> Json:
    """Raises InvalidRequest for a schema that is no JSON or nested too deep. The engine refuses one that it cannot
    enforce as a whole if `is_strict`; else it names what it leaves out, see Finished.
    """
    if not is_shallow(schema, MAX_DEPTH):
        raise InvalidRequest(f"the JSON schema is nested more than {MAX_DEPTH} deep.")
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


def arguments_part(parameters: Mapping[str, Any], *, is_strict: bool = False) -> Json:
    """The arguments of a tool with the schema `parameters`; see `json_part`. Raises InvalidRequest."""
    schema: dict[str, Any] = {"type": "object", **parameters}
    _close_arguments(schema)
    return json_part(schema, is_strict=is_strict)


def call_part(name: str, key: str, parameters: Mapping[str, Any], *, is_strict: bool = False) -> Json:
    """An object with the `name` of a tool, and under `key` its arguments; see `json_part`. Raises InvalidRequest."""
    schema: dict[str, Any] = {"type": "object", **_move_references(dict(parameters), f"#/properties/{key}")}
    _close_arguments(schema)
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, key: schema},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return json_part(call, is_strict=is_strict)


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
        raise InvalidRequest(f"the grammar cannot be read: {fault[:200]}.") from error
    return Structure(((Grammar(lark.removeprefix("%llguidance {}")),),))


def regex_structure(pattern: str) -> Structure:
    """Text of which the whole matches a regular expression."""
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if inner.endswith("$") and not inner.endswith("\\$") else inner
    escaped = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), inner)
    return Structure(((Grammar(f"start: /(?:{escaped})/"),),))


def choice_structure(texts: Iterable[str]) -> Structure:
    """One of several texts, also where one spells a control token."""
    return Structure(tuple((Grammar(f"start: {json.dumps(text)}"),) for text in texts))


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
