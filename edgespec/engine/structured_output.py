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
from edgespec.core.sampling import Distribution, Indices, Logits, Sampler, SamplingParams
from edgespec.engine.grammar_check_main import describe_fault
from edgespec.errors import InvalidRequest, reason_of
from edgespec.text.tokenizer import Tokenizer, token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher


# JSON schemas in the form that llguidance compiles. What it does not implement it leaves out with a warning.
#
# Rewritten is only what would make it refuse a common schema, or ignore what can be said in another way.


MAX_DEPTH = 64
_SCALARS = (str, int, float, type(None))
_DIALECT = re.compile(r"https?://json-schema\.org/draft(-0[3467]|/20(19-09|20-12))/schema#?")
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")  # characters of regular expressions
_NAME_FORMATS = {
    "uuid": r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "date": r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$",
}


def adapt_schema(root: Any) -> tuple[Any, list[str]]:
    """(`root`, nested at most MAX_DEPTH deep, for llguidance; the rules that are left out of it, as sentences)"""
    dropped: list[str] = []

    def adapt(schema: Any, where: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        if schema.get("not") in ({}, True) and "not" in schema:  # zod's never
            return False
        out = dict(schema)
        if isinstance(dialect := out.get("$schema"), str) and not _DIALECT.fullmatch(dialect):
            del out["$schema"]  # it cannot be fetched
        _write_names(out, root)
        if not _is_regular(out.get("pattern")):
            del out["pattern"]
            dropped.append(f"pattern at {where} is not enforced.")
        if isinstance(out.get("pattern"), str):
            out.pop("format", None)  # zod's pattern of a time contradicts the format, which demands a zone
        if isinstance(patterns := out.get("patternProperties"), dict) and not all(map(_is_regular, patterns)):
            out["patternProperties"] = {each: rule for each, rule in patterns.items() if _is_regular(each)}
            out["additionalProperties"] = True
            dropped.append(f"patternProperties at {where} is not enforced.")
        for key in ("items", "additionalProperties", "additionalItems"):
            if key in out and not isinstance(out[key], list):
                out[key] = adapt(out[key], f"{where}/{key}")
        for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
            if isinstance(parts := out.get(key), list):
                out[key] = [adapt(part, f"{where}/{key}/{i}") for i, part in enumerate(parts)]
        for key in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(named := out.get(key), dict):
                out[key] = {name: adapt(part, f"{where}/{key}/{name}"[:200]) for name, part in named.items()}
        return out

    return adapt(root, "#"), list(dict.fromkeys(dropped))


def _write_names(out: dict[str, Any], root: Any) -> None:
    """Write the propertyNames of a dictionary, which has no named properties, as a pattern; others stay."""
    pattern = _find_name_pattern(_follow(out.get("propertyNames"), root))
    if pattern == "":
        del out["propertyNames"]
    elif pattern is not None and not {"properties", "patternProperties"} & set(out):
        del out["propertyNames"]
        out["patternProperties"] = {pattern: out.get("additionalProperties", True)}
        out["additionalProperties"] = False


def _find_name_pattern(names: Any) -> str | None:
    """A pattern for the texts that the schema `names` allows: "" for any text, None where none is known."""
    if not isinstance(names, dict):
        return None
    values = [names["const"]] if "const" in names else names.get("enum")
    if isinstance(values, list):
        texts = (_SPECIAL.sub(r"\\\g<0>", value) for value in values if isinstance(value, str))
        return f"^(?:{'|'.join(texts)})$"
    rules = {key: value for key, value in names.items() if key not in ("type", "title", "description", "$schema")}
    if set(rules) == {"pattern"} and _is_regular(rules["pattern"]):
        return str(rules["pattern"])
    if set(rules) == {"format"}:
        return _NAME_FORMATS.get(str(rules["format"]))
    if rules and set(rules) <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{rules.get('minLength', 0)},{rules.get('maxLength', '')}}}$"
    return None if rules else ""


def _follow(schema: Any, root: Any) -> Any:
    """What a local reference such as `#/$defs/Colour` names, or `schema` itself."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found = root
    for step in reference[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _is_regular(pattern: object) -> bool:
    """Whether a pattern has no look-around, back reference or word boundary."""
    if not isinstance(pattern, str):
        return True
    found = re.findall(r"\\(.)|(\(\?<?[=!])", pattern, re.DOTALL)
    return not any(look or escape in "123456789kbBc" for escape, look in found)


def is_shallow(value: object, depth: int) -> bool:
    """Whether a JSON value is nested at most `depth` deep."""
    if isinstance(value, list | tuple):
        inner: Iterable[object] = value
    elif isinstance(value, Mapping):
        inner = value.values()
    else:
        return True
    return depth > 0 and all(isinstance(each, _SCALARS) or is_shallow(each, depth - 1) for each in inner)


_WHITESPACE = r"[\x20\x0A\x09]{0,24}"  # between JSON tokens; without a bound a model may never stop writing blanks
_END_WINDOW = 16  # tokens in which the end of the reasoning may be spelled
_EVERYTHING = 2**40
MAX_CHARACTERS = 2**18  # of a schema


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


@dataclass(frozen=True, slots=True)
class Block:
    """Parts of an answer, any number of them: what follows `opening` has the structure, the text around is free."""

    opening: str
    structure: Structure


def json_part(schema: Any, *, is_strict: bool = False) -> Json:
    """Raises InvalidRequest for a schema that is too large or nested too deep. The engine refuses one that it cannot
    enforce as a whole if `is_strict`; else it names what it leaves out, see Finished.
    """
    if not is_shallow(schema, MAX_DEPTH):
        raise InvalidRequest(f"the JSON schema is nested more than {MAX_DEPTH} deep.", hint="Simplify it.")
    adapted, dropped = adapt_schema(schema)
    if isinstance(adapted, dict):
        options = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": not is_strict, "lenient": not is_strict}
        adapted["x-guidance"] = options
    try:
        text = json.dumps(adapted)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the JSON schema cannot be read: {error}.", hint="Check the schema.") from error
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"the JSON schema has more than {MAX_CHARACTERS:,} characters.", hint="Simplify it.")
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
    is_argmax = False
    row_params: SamplingParams | None = None

    def __init__(
        self, matcher: LLMatcher, sampler: Sampler, tokenizer: Tokenizer, prompt_length: int, after: bytes
    ) -> None:
        """The grammar of `matcher` begins at the end of the prompt, or after the first `after`."""
        self._matcher = matcher
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._start = prompt_length
        self._after = after
        self._consumed: list[int] = []
        self._begin: int | None = None if after else 0  # position of the structure, from the end of the prompt
        self._head: list[int] = []  # tokens that end the reasoning, before `_begin`
        self._searched: list[int] = []  # an answer in which the reasoning does not end
        self._bits = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)

    def distribution(self, logits: Logits, prefix: Sequence[int]) -> Distribution:
        """The distribution after `prefix`. Raises InvalidRequest where the grammar becomes too complex."""
        if self._follow(prefix):
            logits = self._mask(logits)
        elif self._begin is None:  # generation must not end before the structure
            logits = logits.copy()
            logits[list(self._tokenizer.end_of_generation)] = -np.inf
        return self._sampler.distribution(logits, prefix)

    def forced(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that the grammar forces after `prefix`, as the tokenizer would spell them."""
        return self._matcher.compute_ff_tokens() if self._follow(prefix) else []

    def ends(self, answer: list[int]) -> bool:
        """Whether nothing can follow the tokens `answer`, which begin where the structure does."""
        return self._advance(answer) and self._matcher.is_stopped()

    def _mask(self, logits: Logits) -> Logits:
        """The logits with -inf for what the grammar forbids; unchanged where only the best counts and is allowed."""
        allowed = self._read_bits()
        if self._sampler.is_argmax:
            best = int(logits.argmax())
            if allowed[best // 8] >> best % 8 & 1:
                return logits
        forbidden = ~allowed
        if np.count_nonzero(forbidden) < np.count_nonzero(allowed):  # bytes, of which most have one value
            masked = logits.copy()
            tokens = _list_bits(forbidden)
            masked[tokens[: tokens.searchsorted(len(masked))]] = -np.inf  # without the bits behind the last token
        else:
            masked = np.full(len(logits), -np.inf, np.float32)
            tokens = _list_bits(allowed)
            masked[tokens] = logits[tokens]
        return masked

    def _read_bits(self) -> npt.NDArray[np.uint8]:
        """A bit for each token, the first in the lowest bit: whether the grammar allows it next."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        self._require_sound()
        bits: npt.NDArray[np.uint8] = self._bits.view(np.uint8)[0]
        return bits

    def _follow(self, prefix: Sequence[int]) -> bool:
        """Advance or roll back the grammar to the end of `prefix`; returns whether it applies there."""
        answer = list(prefix[self._start :])
        if self._after and not self._find_begin(answer):
            return False
        return self._advance(answer[self._begin :])

    def _advance(self, wanted: list[int]) -> bool:
        common = _shared(self._consumed, wanted)
        if len(self._consumed) > common:
            self._matcher.rollback(len(self._consumed) - common)
        taken = self._matcher.try_consume_tokens(wanted[common:]) if len(wanted) > common else 0
        self._consumed = wanted[: common + taken]
        self._require_sound()
        # Block verification asks for distributions behind a forbidden token. That token is never accepted, so any
        # distribution is right there.
        return len(self._consumed) == len(wanted)

    def _find_begin(self, answer: list[int]) -> bool:
        """Set `_begin` to the end of the reasoning in `answer`; returns whether it ends there."""
        if self._begin is not None and answer[max(0, self._begin - _END_WINDOW) : self._begin] == self._head:
            return True
        first = max(1, len(answer) - 128, _shared(self._searched, answer) + 1)
        for end in range(first, len(answer) + 1):
            head = answer[max(0, end - _END_WINDOW) : end]
            if self._after in self._text(head) and self._after not in self._text(head[:-1]):
                self._begin, self._head = end, head
                return True
        self._begin, self._searched = None, answer
        return False

    def _text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(token_bytes(self._tokenizer, token) for token in tokens)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            reason = describe_fault(self._matcher.get_error())
            raise InvalidRequest(f"the answer's structure cannot be followed: {reason}.", hint="Simplify it.")


def _list_bits(bits: npt.NDArray[np.uint8]) -> Indices:
    """The places of the bits that are set, ascending."""
    at: Indices = np.flatnonzero(bits != 0)
    if 4 * len(at) > len(bits):
        return np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_))
    places = np.flatnonzero(np.unpackbits(bits[at], bitorder="little").view(np.bool_))
    tokens: Indices = at[places >> 3] * 8 + (places & 7)
    return tokens


def _shared(one: list[int], other: list[int]) -> int:
    """How many leading tokens agree."""
    n = min(len(one), len(other))
    return n if one[:n] == other[:n] else shared_prefix(one, other, n)
