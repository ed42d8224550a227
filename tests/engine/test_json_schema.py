"""Everyday schemas are compiled; what is written within the grammar is valid, or what is not enforced is named."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load as load_toy
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.engine.grammar_mask import GrammarMask
from edgespec.engine.schema_adaptation import adapt_schema
from edgespec.engine.structure import Structure, arguments_part, call_part, json_structure
from edgespec.errors import InvalidRequest
from edgespec.text.tokenizer import Tokenizer
from tests.engine.everyday_schemas import ALL

LONG = 400  # tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_toy("tree", LoadOptions()).tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(tokenizer)) as made:
        yield made


def write(mask: GrammarMask, tokenizer: Tokenizer, seed: int) -> str | None:
    """A random text within a grammar; None where it does not end soon."""
    chance, tokens, ends = random.Random(seed), list[int](), tokenizer.end_of_generation
    short = {token for char in '"}]' for token in tokenizer.encode(char, parse_special=False)}
    blank = {token for char in " \n\t" for token in tokenizer.encode(char, parse_special=False)}
    while len(tokens) < LONG:
        assert mask._follow(tokens)
        bits = mask._allowed()[: tokenizer.vocab_size]
        allowed = [int(token) for token in bits.nonzero()[0] if token not in blank] or [int(bits.argmax())]
        closing = [token for token in allowed if token in ends or token in short]
        token = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
        if token in ends:
            return b"".join(map(tokenizer.piece, tokens)).decode()
        tokens.append(token)
    return None


@pytest.mark.parametrize("name", ALL)
def test_every_schema_is_served(name: str, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    schema = ALL[name]
    structure, sampler = json_structure(schema), Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    matcher = compiler.compile(structure).result()
    mask, left_out = GrammarMask(matcher, sampler, 0), matcher.get_grammar_warnings()
    is_whole = not left_out and not structure.unenforced
    for seed in range(4):
        text = write(mask, tokenizer, seed)
        if text is not None and is_whole and "\\p{" not in str(schema):  # which re cannot read
            validator_for(schema, default=Draft202012Validator)(schema).validate(json.loads(text))
    if name.startswith(("zod", "pydantic", "openai")):
        assert is_whole == (name not in NAMED), left_out
    if is_whole:
        assert not compiler.compile(json_structure(schema, is_strict=True)).result().is_error()
    else:
        with pytest.raises(InvalidRequest):
            compiler.compile(json_structure(schema, is_strict=True)).result()


# Schemas of the usual libraries that cannot be enforced as a whole.
NAMED = {
    *(f"pydantic {name}" for name in ("bytes", "set", "set of few", "frozenset", "set of an enum", "path", "file")),
    *(f"pydantic {name}" for name in ("secret", "base64", "ipv4 network", "look-ahead")),
    *(f"pydantic dict of {name}" for name in ("ids", "dates")),
    *(f"zod {name}" for name in ("never", "email", "jwt", "duration", "record of emails", "xor", "file")),
    "zod password rules",
    *(f"zod {name}" for name in ("regex with a flag", "back reference")),
}


def test_what_is_dropped_is_named() -> None:
    (told,) = json_structure(ALL["zod email"]).unenforced
    assert told.startswith("the pattern ") and told.endswith(" is not enforced: it has (?!.")
    (told,) = json_structure(ALL["look-ahead in a name"]).unenforced
    assert told.startswith("the pattern ")
    with pytest.raises(InvalidRequest, match="strict is true, but the schema cannot be enforced: the pattern"):
        json_structure(ALL["zod email"], is_strict=True)


def spell(value: Any, mask: GrammarMask, tokenizer: Tokenizer) -> bool:
    """Whether the grammar takes `value`, or this text, as a whole."""
    text = value if isinstance(value, str) else json.dumps(value)
    tokens = tokenizer.encode(text, parse_special=False)
    if not mask._follow(tokens):
        return False
    bits = mask._allowed()
    return any(bits[end] for end in tokenizer.end_of_generation)


RULES: list[tuple[str, list[Any], list[Any]]] = [
    ("zod discriminated", [{"t": "a", "x": 1}], [{"t": "a", "y": "x"}]),
    ("zod record", [{"x": 1}, {}], [{"x": "1"}]),
    ("zod record of an enum", [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": "x", "b": 1}]),
    ("zod partial record", [{"a": 1}, {"b": 1}, {}], [{"c": 1}, {"a": "x"}]),
    ("zod record of lengths", [{"ab": True}, {"abc": True}, {}], [{"a": True}, {"abcd": True}, {"ab": 1}]),
    ("pydantic dict of an enum", [{"red": 1}, {"red": 1, "blue": 2}], [{"green": 1}, {"red": "x"}]),
]
NAMES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "any values": ({"propertyNames": {"enum": ["a"]}, "additionalProperties": {}}, [{"a": [1]}], [{"b": 1}]),
    "no others": ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": False,
                   "properties": {"b": {"type": "null"}, "c": {}}}, [{"b": None}, {}], [{"a": 1}, {"c": 1}, {"b": 1}]),
    "choices": ({"propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b"]}]}}, [{"a": 1, "b": 2}], [{"c": 1}]),
    "a pattern": ({"propertyNames": {"pattern": "^x-"}, "additionalProperties": {"type": "null"}},
                  [{"x-1": None}], [{"y": None}, {"x-1": 1}]),
    "a reference": ({"propertyNames": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {"maxLength": 1}}},
                    [{"x": 1}], [{"xy": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_that_the_schema_allows(name: str, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    schema, good, bad = NAMES[name]
    structure = json_structure({"type": "object", **schema}, is_strict=True)
    mask = GrammarMask(compiler.compile(structure).result(), Sampler(SamplingParams(), tokenizer.vocab_size), 0)
    assert [value for value in good if not spell(value, mask, tokenizer)] == []
    assert [value for value in bad if spell(value, mask, tokenizer)] == []


@pytest.mark.parametrize(("name", "good", "bad"), RULES, ids=[name for name, _, _ in RULES])
def test_rules_are_kept_and_no_more(
    name: str, good: list[Any], bad: list[Any], tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    mask = GrammarMask(compiler.compile(json_structure(ALL[name])).result(), sampler, 0)
    assert [value for value in good if not spell(value, mask, tokenizer)] == []
    assert [value for value in bad if spell(value, mask, tokenizer)] == []


_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
_LABEL = {"type": "string", "maxLength": 4}
_SAME = {"properties": {"a": _DIGIT, "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]}
_TREE = {"properties": {"label": _LABEL, "kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#"}}},
         "required": ["label", "kids"]}  # fmt: skip
_PICKED = {"$ref": "#/$defs/Ask", "$defs": {"Ask": {"type": "object", "properties": {"at": {"$ref": "#/$defs/Day"}},
           "required": ["at"]}, "Day": _DIGIT}}  # fmt: skip
TOOLS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "a reference to a property": (_SAME, [{"a": 1, "b": 2}], [{"a": 1, "b": "x"}, {"a": 1, "b": 10}]),
    "a reference to the root": (_TREE, [{"label": "x", "kids": [{"label": "y", "kids": []}]}],
                                [{"label": "x", "kids": [{"name": "t", "arguments": {}}]}, {"label": 1, "kids": []}]),
    "references to definitions": (_PICKED, [{"at": 3}], [{"at": "x"}, {}]),
    "a root with an id": ({"$id": "https://example.com/t", **_SAME}, [{"a": 1, "b": 2}], [{"a": 1, "b": "x"}]),
    "a property named $ref": ({"properties": {"$ref": {"const": "#"}}}, [{"$ref": "#"}], [{"$ref": "x"}]),
    "a record": ({"properties": {"by": {"type": "object", "propertyNames": {"$ref": "#/$defs/k"},
                  "additionalProperties": _DIGIT}}, "$defs": {"k": {"enum": ["x", "y"]}}, "required": ["by"]},
                 [{"by": {"x": 1}}], [{"by": {"z": 1}}, {"by": {"x": "1"}}]),
    "nothing at all": ({}, [{}], [{"a": 1}]),
    "no properties": ({"properties": {}}, [{}], [{"a": 1}]),
    "any properties": ({"additionalProperties": {}}, [{}, {"a": 1}], []),
    "an open object within": ({"properties": {"a": {"type": "object"}}}, [{"a": {"b": 1}}], [{"b": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOOLS)
def test_the_schema_of_a_tool_holds_within_a_call(name: str, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Alone, and beside the tool's name."""
    parameters, good, bad = TOOLS[name]
    alone, call = arguments_part(parameters, is_strict=True), call_part("t", "arguments", parameters, is_strict=True)
    for part, wrap in ((alone, lambda each: each), (call, lambda each: {"name": "t", "arguments": each})):
        matcher = compiler.compile(Structure(((part,),))).result()
        mask = GrammarMask(matcher, Sampler(SamplingParams(), tokenizer.vocab_size), 0)
        assert [value for value in good if not spell(wrap(value), mask, tokenizer)] == []
        assert [value for value in bad if spell(wrap(value), mask, tokenizer)] == []


_A, _AB = {"a": {"type": "integer"}}, {"a": {"type": "integer"}, "b": {"type": "integer"}}
_C = {"c": {"type": "null"}}
_WITHIN = {"x": {"type": "array", "items": {"type": "object", "properties": _A}}}
_EITHER = [{"properties": _A}, {"properties": _C}]
_CHOICES = [{"properties": _AB, "required": ["b"]}, {"properties": _C}]
OBJECTS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "declared keys": ({"type": "object", "properties": _A}, [{"a": 1}, {}], [{"b": 1}, {"a": 1, "b": 1}]),
    "within others": ({"type": "object", "properties": _WITHIN},
                      [{"x": [{"a": 1}]}], [{"x": [{"b": 1}]}, {"y": 1}]),
    "named": ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": _A}}}, [{"a": 1}], [{"b": 1}]),
    "choices": ({"anyOf": [{"type": "object", "properties": _A}, {"type": "null"}]}, [{"a": 1}, None], [{"b": 1}]),
    "said to be open": ({"type": "object", "properties": _A, "additionalProperties": True}, [{"a": 1, "b": 1}], []),
    "no declared keys": ({"type": "object"}, [{"a": 1, "b": 1}], []),
    "declared together": ({"allOf": [{"type": "object", "properties": _A}, {"type": "object", "properties": _AB}]},
                          [{"a": 1, "b": 1}], []),
    "choices beside keys": ({"type": "object", "properties": _A, "required": ["a"],
                             "anyOf": _CHOICES},
                            [{"a": 1, "b": 1}], []),
    "keys beside a reference": ({"$ref": "#/$defs/x", "properties": _C, "required": ["c"],
                                 "$defs": {"x": {"type": "object", "properties": _A}}}, [{"a": 1, "c": None}], []),
    "choices of references beside keys": ({"type": "object", "properties": _C, "anyOf": [{"$ref": "#/$defs/x"}],
                                           "$defs": {"x": {"type": "object", "properties": _A}}}, [{"a": 1}], []),
    "choices beside needed keys": ({"type": "object", "required": ["a", "c"], "anyOf": _EITHER},
                                   [{"a": 1, "c": None}], []),
    "a needed key that is not declared": ({"type": "object", "properties": _A, "required": ["b"]}, [{"b": 1}], []),
    "white space": ({"type": "object", "properties": _A}, ['{"a":1}', '{ "a": 1 }'], ['{\n"a": 1}', '{"a":  1}']),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_answers_have_declared_keys_and_little_white_space(
    name: str, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """Objects that say nothing of other keys are closed, unless their keys are declared in several places."""
    schema, good, bad = OBJECTS[name]
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    mask = GrammarMask(compiler.compile(json_structure(schema)).result(), sampler, 0)
    assert [value for value in good if not spell(value, mask, tokenizer)] == []
    assert [value for value in bad if spell(value, mask, tokenizer)] == []


@pytest.mark.parametrize("part", [{"required": 1}, {"required": [{}]}])
def test_a_damaged_schema_is_refused(part: dict[str, Any], compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest):
        compiler.compile(json_structure({"type": "object", "properties": _A, **part})).result()


KEYWORDS = "pattern format propertyNames patternProperties not items $schema $ref additionalProperties $defs"


@pytest.mark.parametrize("keyword", KEYWORDS.split())
def test_no_value_of_a_keyword_is_a_fault_of_ours(keyword: str) -> None:
    values: list[Any] = [None, True, -1, 1.5, "x", [], [1], {}, {"a": []}, {"enum": 1}, {"$ref": "#/a/b"}, {"$ref": 1}]
    for value in values:
        adapt_schema({"properties": {"a": {}}, keyword: value})
        adapt_schema({"type": "object", "oneOf": [{keyword: value}, {"type": "object"}]})


def test_constants_and_names_are_no_schemas() -> None:
    look = {"pattern": "(?=a)b", "format": "date"}
    schema = {"enum": [look], "const": look, "properties": {"const": dict(look), "pattern": {"type": "string"}}}
    adapted, dropped = adapt_schema(schema)
    assert adapted == {"enum": [look], "const": look, "properties": {"const": {}, "pattern": {"type": "string"}}}
    assert len(dropped) == 1
