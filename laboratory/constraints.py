"""Answer under grammars with the vocabularies of many models, on both runtimes, and check every answer.

    uv run python -m laboratory.constraints FOLDER [--runtime llamacpp] [--only llama-spm ...] [--every 1]

FOLDER has GGUF files with vocabularies, such as those of llama.cpp (models/ggml-vocab-*.gguf). Each becomes a small
random model, whose words are noise within what the grammar leaves it. Each of the constraints (JSON schemas, choices,
regular expressions, calls, blocks among free text, and structures after reasoning) is answered plainly and with three
kinds of drafts. "cut" are answers that reached their limit of tokens, "invalid" those that broke their constraint,
"refused" those that the vocabulary has no tokens for, and "failed" those that ended with another error. The exit code
is 1 where an answer is invalid or failed. Vocabularies of models that write no text (the BERT family's, which have no
token for a line break, and some none to end a text) are left out; their names are printed. stdout ends with one JSON
line.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import gguf
from jsonschema import Draft202012Validator

from benchmarks.harness import print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.engine.structure import (
    Structure,
    arguments_part,
    call_part,
    choice_structure,
    grammar_structure,
    json_part,
    json_structure,
    regex_structure,
)
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.models.drafts import DrafterPlan
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece
from edgespec.text.tool_calls import load_json
from laboratory.vocabulary_models import read_vocabulary, write_gguf, write_mlx

Runtime = Literal["llamacpp", "mlx"]
RUNTIMES: tuple[Runtime, ...] = ("llamacpp", "mlx")
TEMPLATE = "{{ messages[0].content }}<think>{# </think> #}"  # the prompt begins the reasoning
MAX_TOKENS = 400
GREEDY, WARM = SamplingParams(temperature=0), SamplingParams(temperature=1)
WAYS: tuple[tuple[Speculation, SamplingParams], ...] = (
    (Speculation(), GREEDY),
    (Speculation(("ngram",), 4), WARM),
    (Speculation(("model",), 3, None, "sample"), GREEDY),
    (Speculation(("model",), 3, None, "block"), WARM),
)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A structure, and whether a text follows it. `request` has further fields of the Request."""

    name: str
    structure: Structure
    is_valid: Callable[[str], bool]
    request: dict[str, Any] = field(default_factory=dict)


_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
_WORD = {"type": "string", "maxLength": 6}


def _closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _list(item: Any, most: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "maxItems": most}


SCHEMAS: dict[str, Any] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "digit": _DIGIT,
    "range": {"type": "integer", "minimum": -120, "maximum": 3500},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
    "enum": {"enum": ["red", "blue", "dark green", 7, None]},
    "const": {"const": {"kind": "a rather long text", "list": [1, 2, "three"], "last": None}},
    "const with spaces": {"const": "  two  spaces before, and behind  "},
    "const of other scripts": {"const": "Größe 漢字 Привет 🙂 é"},
    "const with escapes": {"const": 'line\n"quoted"\t\\ and </think>'},
    "short text": _WORD,
    "long text": {"type": "string", "minLength": 20, "maxLength": 60},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "pattern": {"type": "string", "pattern": r"^\d{3}-[A-Z]{2,4}$"},
    "pattern of spaces": {"type": "string", "pattern": r"^ {2}[ab] [ab]$"},
    "kind and number": _closed(kind={"enum": ["red", "blue"]}, n=_DIGIT),
    "nested": _closed(place=_closed(city=_WORD, at=_closed(x=_DIGIT, y=_DIGIT))),
    "list of digits": _list(_DIGIT, 6),
    "list of objects": _list(_closed(name=_WORD, ok={"type": "boolean"}), 3),
    "tuple": {"type": "array", "prefixItems": [_DIGIT, _WORD], "items": False, "minItems": 2},
    "optional": {"type": "object", "properties": {"a": _DIGIT, "b": _WORD}, "additionalProperties": False},
    "union": {"anyOf": [_DIGIT, _WORD, {"type": "null"}]},
    "union of objects": {"anyOf": [_closed(t={"const": "a"}, x=_DIGIT), _closed(t={"const": "b"}, y=_WORD)]},
    "definitions": {"$defs": {"p": _closed(x=_DIGIT)}, **_closed(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    "record": {"type": "object", "propertyNames": {"enum": ["a b", "é"]}, "additionalProperties": _DIGIT},
    "long keys": _closed(**{"a key with spaces and a colon: yes": _DIGIT, "another_key_that_is_long": _DIGIT}),
    "keys of other scripts": _closed(名前=_WORD, größe=_DIGIT),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "two": ("hello world", "red"),
    "spaces": (" hello", "hello", "  hello  world "),
    "prefixes": ("a", "ab", "abc", "abcd efg"),
    "other scripts": ("да", "нет", "はい", "いいえ", "🙂🙃", "naïve café"),
    "lines": ("one\ntwo\n\nthree", "\n", "\ttab"),
    "markup": ("<b>bold</b>", "<tool_call>", "[INST] x [/INST]", "</s>"),
    "long": ("The quick brown fox jumps over the lazy dog, and nothing else happens.",),
}
PATTERNS: dict[str, str] = {
    "digits": r"[0-9]{2,6}",
    "words": r"(red|blue)( (red|blue)){1,3}",
    "letters": r"[a-z]{3,12}",
    "spaces": r" {1,3}x {1,3}y",
    "mail": r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)",
    "letters of others": r"[äöüß]{2,5}[ñøå]{2,5}",
}
_INVALID = object()  # no JSON
_GBNF = 'root ::= "hello world" | item item\nitem ::= "- " [a-z]{1,5} "\\n"'


def _follows(schema: Any) -> Callable[[str], bool]:
    validator = Draft202012Validator(schema)

    def is_valid(text: str) -> bool:
        value = load_json(text, _INVALID)
        return value is not _INVALID and bool(validator.is_valid(value))

    return is_valid


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")  # shown where they are control tokens
_TREE = {"properties": {"label": _WORD, "kids": _list({"$ref": "#"}, 1)}, "required": ["label", "kids"]}
TOOLS: dict[str, dict[str, Any]] = {
    "f": {},
    "get_weather": _closed(city=_WORD, days=_DIGIT),
    "tree": _TREE,
    "count": _closed(by={**SCHEMAS["record"], "minProperties": 1}),
}


def _list_calls() -> Iterator[Constraint]:
    """Calls whose name is in the JSON, and those whose arguments stand behind it."""
    for name, parameters in TOOLS.items():
        follows = _follows(parameters or {"maxProperties": 0})

        def is_call(text: str, name: str = name, follows: Callable[[str], bool] = follows) -> bool:
            found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
            call = load_json(found[1], {}) if found is not None else {}
            has_parts = isinstance(call, dict) and call.keys() == {"name", "arguments"} and call["name"] == name
            return has_parts and follows(json.dumps(call["arguments"]))

        parts = ("<tool_call>", "\n", call_part(name, "arguments", parameters), "\n", "</tool_call>")
        yield Constraint(f"call of {name}", Structure((parts,)), is_call, {"visible": _MARKS})

    def has_arguments(text: str) -> bool:
        before, _, arguments = text.partition("[ARGS]")
        return before == "[TOOL_CALLS]get_weather" and _follows(TOOLS["get_weather"])(arguments)

    behind = ("[TOOL_CALLS]", "get_weather", "[ARGS]", arguments_part(TOOLS["get_weather"]))
    yield Constraint("arguments behind a name", Structure((behind,)), has_arguments, {"visible": _MARKS})


def _list_others() -> Iterator[Constraint]:
    """A grammar, blocks among free text, and structures after reasoning."""
    yield Constraint("GBNF", grammar_structure(_GBNF), _matches(r"hello world|(- [a-z]{1,5}\n){2}"))
    block = Structure(((json_part({"enum": [1, 23, 235]}), "]"),))
    yield Constraint("blocks", block, _has_blocks, {"opening": "e", "max_tokens": 60})
    thinks = {"prompt": (Message("user", "hi"),), "max_reasoning": 3}
    schema = SCHEMAS["kind and number"]
    yield Constraint("schema after reasoning", json_structure(schema), _follows(schema), thinks)
    texts = CHOICES["spaces"]
    yield Constraint("choice after reasoning", choice_structure(texts), texts.__contains__, thinks)


def _has_blocks(text: str) -> bool:
    """Whether a block begins behind every "e"; the last one may be cut."""
    *whole, last = text.split("e")[1:] or [""]
    begun = any(f"{value}]".startswith(last) or last.startswith(f"{value}]") for value in (1, 23, 235))
    return begun and all(re.match(r"(1|23|235)\]", each) for each in whole)


def list_constraints() -> list[Constraint]:
    """All constraints, about fifty."""
    found = [Constraint(f"schema {name}", json_structure(schema), _follows(schema)) for name, schema in SCHEMAS.items()]
    for name, texts in CHOICES.items():
        found.append(Constraint(f"choice {name}", choice_structure(texts), texts.__contains__))
    found += [Constraint(f"pattern {name}", regex_structure(p), _matches(p)) for name, p in PATTERNS.items()]
    return [*found, *_list_calls(), *_list_others()]


@contextmanager
def open_engine(vocabulary: Path, runtime: Runtime) -> Iterator[Engine]:
    """A small random model with a vocabulary, which also drafts for itself: what a mask forbids, it drafts."""
    options = LoadOptions(threads=1, context_size=768)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("model.gguf" if runtime == "llamacpp" else "model")
        (write_gguf if runtime == "llamacpp" else write_mlx)(vocabulary, path, TEMPLATE)
        target, draft = (open_model(runtime, path, options) for _ in range(2))
        specs = drafter_specs()
        drafters = [LoadedDrafter(DrafterPlan(specs["ngram"])), LoadedDrafter(DrafterPlan(specs["model"]), draft)]
        engine = Engine(target, drafters, Speculation())
        try:
            yield engine
        finally:
            engine.close()


def check_answers(engine: Engine, constraints: Iterable[Constraint]) -> tuple[Counter[str], list[str]]:
    """How the answers ended, each of WAYS for each constraint, and what is wrong with those that are not valid."""
    ends: Counter[str] = Counter()
    faults: list[str] = []
    for seed, constraint in enumerate(constraints):
        for n, (speculation, sampling) in enumerate(WAYS):
            fields = {"prompt": "hello", "max_tokens": MAX_TOKENS, **constraint.request}
            request = Request(**fields, sampling=sampling, seed=seed, structure=constraint.structure)
            end, text = _answer(engine, request, speculation, constraint.is_valid)
            ends[end] += 1
            if end != "valid":
                faults.append(f"{constraint.name}, way {n}: {end}: {text[:200]!r}")
    return ends, faults


def _answer(
    engine: Engine, request: Request, speculation: Speculation, is_valid: Callable[[str], bool]
) -> tuple[str, str]:
    """How an answer ended, and its text or what went wrong."""
    text = ""
    try:
        for event in engine.generate(request, speculation=speculation):
            if isinstance(event, Piece) and event.channel == "answer":
                text += event.text
            if isinstance(event, Finished) and event.reason == "length" and request.opening is None:
                return "cut", text
    except InvalidRequest as error:
        return "refused", str(error)
    except EdgespecError as error:
        return "failed", f"{error} after {text}"
    return "valid" if is_valid(text) else "invalid", text


def writes_text(vocabulary: Path) -> bool:
    """Whether a model with this vocabulary may generate."""
    architecture = str(gguf.GGUFReader(vocabulary).fields["general.architecture"].contents())
    return "bert" not in architecture and "eos_token_id" in read_vocabulary(vocabulary)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--runtime", "runtimes", type=click.Choice(RUNTIMES), multiple=True, default=RUNTIMES)
@click.option("--only", multiple=True, help="Part of a vocabulary's name.")
@click.option("--every", default=1, help="Take every so manieth constraint.")
def main(folder: Path, runtimes: tuple[Runtime, ...], only: tuple[str, ...], every: int) -> None:
    files = [each for each in sorted(folder.glob("*.gguf")) if not only or any(part in each.name for part in only)]
    constraints = list_constraints()[::every]
    total: Counter[str] = Counter()
    for path in files:
        for runtime in runtimes if writes_text(path) else ():
            with open_engine(path, runtime) as engine:
                ends, faults = check_answers(engine, constraints)
            click.echo(f"{path.stem} {runtime}: {dict(ends)}")
            for fault in faults:
                click.echo(f"  {fault}")
            total += ends
    left_out = [path.stem for path in files if not writes_text(path)]
    print_result("constraints", {"constraints": len(constraints), "ends": dict(total), "left_out": left_out})
    raise SystemExit(bool(total["invalid"] or total["failed"]))


if __name__ == "__main__":
    main()
