"""Everyday schemas are compiled; what is written within the grammar is valid, or what is not enforced is named."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load as load_toy
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine.grammar import GrammarCompiler
from edgespec.engine.json_schema import adapt_schema
from edgespec.engine.structured_output import GrammarMask, json_structure
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
        bits = np.unpackbits(mask._read_bits(), bitorder="little")[: tokenizer.vocab_size]
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
    mask = compiler.constrain(structure, sampler, 0)
    for seed in range(4):
        text = write(mask, tokenizer, seed)
        if text is not None and not structure.unenforced and "\\p{" not in str(schema):  # which re cannot read
            validator_for(schema, default=Draft202012Validator)(schema).validate(json.loads(text))


NAMED = {
    "pydantic set": "uniqueItems",
    "zod email": "pattern",
    "zod xor": "oneOf",
    "zod record of emails": "propertyNames",
    "openapi dates": "format 'password'",
    "not a pattern": "not",
    "if of numbers": "if",
    "contains": "contains",
    "unevaluated alternatives": "unevaluatedProperties",
    "at most one": "maxProperties",
    "look-ahead in a name": "patternProperties",
}


@pytest.mark.parametrize(("name", "keyword"), NAMED.items(), ids=list(NAMED))
def test_what_is_not_enforced_is_named(name: str, keyword: str) -> None:
    (told,) = json_structure(ALL[name]).unenforced
    assert told.startswith(f"{keyword} at #") and told.endswith("is not enforced.")
    with pytest.raises(InvalidRequest, match="strict is true, but the schema cannot be enforced: " + keyword):
        json_structure(ALL[name], is_strict=True)


def test_what_is_enforced_may_be_strict() -> None:
    made = [(schema, json_structure(schema)) for schema in ALL.values()]
    whole = [(schema, structure) for schema, structure in made if not structure.unenforced]
    assert len(whole) >= 140 and all(json_structure(schema, is_strict=True) == found for schema, found in whole)


def spell(value: Any, mask: GrammarMask, tokenizer: Tokenizer) -> bool:
    """Whether the grammar takes `value` as a whole."""
    tokens = tokenizer.encode(json.dumps(value), parse_special=False)
    if not mask._follow(tokens):
        return False
    bits = np.unpackbits(mask._read_bits(), bitorder="little")
    return any(bits[end] for end in tokenizer.end_of_generation)


RULES: list[tuple[str, list[Any], list[Any]]] = [
    ("if", [{"kind": "flat", "floor": 1}, {"kind": "house", "garden": True}], [{"kind": "flat"}, {"kind": "house"}]),
    ("ifs", [{"kind": "flat", "floor": 1}, {"kind": "house", "garden": True}], [{"kind": "flat"}, {"kind": "house"}]),
    ("if absent", [{}, {"kind": "house"}, {"kind": "flat", "floor": 1}], [{"kind": "flat"}]),
    ("dependent", [{}, {"address": "x"}, {"card": 1, "address": "x"}], [{"card": 1}]),
    ("dependent of a required one", [{"a": 1, "b": 2}], [{"a": 1}]),
    ("dependent schemas", [{"b": 1}, {"a": 1, "b": 5}], [{"a": 1}, {"a": 1, "b": 1}]),
    ("draft-07 dependencies", [{"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    ("unique few", [[1, 2], [3, 1, 2]], [[1], [1, 1], [1, 2, 1]]),
    ("not a value", ["a", "c"], ["b"]),
    ("not a type", [1, 1.5, True], ["x", None, []]),
    ("not either", [None, True], [1, "x"]),
    ("not required", [{"a": 1}, {"b": 1}, {}], [{"a": 1, "b": 1}]),
    ("unevaluated", [{"a": 1}, {}], [{"b": 1}]),
    ("unevaluated after a reference", [{"a": 1, "b": "x"}], [{"a": 1, "b": "x", "c": 1}, {"b": "x"}]),
    ("unevaluated items", [[1, 2], [1]], [[1, 2, 3]]),
    ("at least one", [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}], [{}]),
    ("contains any", [[1]], [[]]),
    ("zod partial record", [{"a": 1}, {}], [{"c": 1}]),
    ("zod record of lengths", [{"ab": True}, {}], [{"a": True}, {"abcd": True}, {"ab": 1}]),
    ("zod never", [{"a": "x"}], [{"a": "x", "b": 1}]),
    ("zod discriminated", [{"t": "a", "x": 1}], [{"t": "a", "y": "x"}]),
    ("pydantic dict of an enum", [{"red": 1}, {}], [{"green": 1}]),
    ("pydantic dict of dates", [{"2020-01-31": 1}], [{"2020": 1}]),
]


@pytest.mark.parametrize(("name", "good", "bad"), RULES, ids=[name for name, _, _ in RULES])
def test_rules_are_kept_and_no_more(
    name: str, good: list[Any], bad: list[Any], tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    mask = compiler.constrain(json_structure(ALL[name]), sampler, 0)
    assert [value for value in good if not spell(value, mask, tokenizer)] == []
    assert [value for value in bad if spell(value, mask, tokenizer)] == []


KEYWORDS = (
    "minItems maxContains type enum format required not if pattern propertyNames uniqueItems dependencies $ref oneOf"
)


@pytest.mark.parametrize("keyword", KEYWORDS.split())
def test_no_value_of_a_keyword_is_a_fault_of_ours(keyword: str) -> None:
    others = {"contains": {"const": 1}, "uniqueItems": True, "items": {"enum": [1]}, "properties": {"a": {}}}
    values: list[Any] = [None, True, -1, 1.5, "x", [], [1], {}, {"a": []}, {"enum": 1}, {"type": [{}]}]
    for value in values:
        adapt_schema({**others, keyword: value})
        adapt_schema({"type": "object", "not": {keyword: value}, "oneOf": [{keyword: value}, {"type": "object"}]})
