"""Benchmark prompts: the shipped sets by category, and a reader of JSONL files."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import InvalidRequest

CATEGORIES = (
    "chat",
    "translation",
    "summary",
    "qa",
    "maths",
    "rag",
    "code_completion",
    "code_edit",
    "json",
    "creative",
    "long_context",
    "adversarial",
)
OWN = "own"  # category of lines without one
MAX_BYTES = 64 << 20

_SURROGATE = re.compile("[\ud800-\udfff]")

_FORM = 'Write one object a line: {"prompt": "..."} or {"question_id": 1, "category": "chat", "turns": ["..."]}.'


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """The user's turns of a conversation; the model answers each."""

    id: str
    category: str
    turns: tuple[str, ...]


def read_shipped_prompts(categories: Sequence[str] | None = None) -> list[BenchPrompt]:
    """The shipped prompts of all or some categories, in the order of CATEGORIES. Raises InvalidRequest."""
    for name in categories or ():
        if name not in CATEGORIES:
            raise InvalidRequest(f"there is no prompt category '{name}'.", hint=f"Choose from {', '.join(CATEGORIES)}.")
    folder = importlib.resources.files("edgespec.bench") / "prompt_sets_data"
    prompts: list[BenchPrompt] = []
    for category in CATEGORIES:
        if categories is None or category in categories:
            name = f"{category}.jsonl"
            prompts += _parse((folder / name).read_bytes(), name)
    return prompts


def take_per_category(prompts: Iterable[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """The first `limit` prompts of each category, in the given order."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= limit:
            chosen.append(prompt)
    return chosen


def read_prompts(path: Path) -> list[BenchPrompt]:
    """The prompts of a JSONL file, in Spec-Bench's form or as {"prompt": ...}; raises InvalidRequest for bad lines."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from error
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"{path} is larger than {MAX_BYTES >> 20} MiB.", hint="Split it or use fewer prompts.")
    return _parse(data, str(path))


def _parse(data: bytes, name: str) -> list[BenchPrompt]:
    """The prompts of a JSONL text; messages call it `name`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise InvalidRequest(f"{name}, line {number} is not UTF-8 text.", hint="Convert it to UTF-8.") from error
    lines: dict[str, int] = {}
    prompts: list[BenchPrompt] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = _parse_line(line, number)
        except _BadLine as error:
            raise InvalidRequest(f"{name}, line {number} {error}.", hint=_FORM) from error
        if prompt.id in lines:
            raise InvalidRequest(
                f"{name}, line {number} has the same id '{prompt.id}' as line {lines[prompt.id]}.",
                hint="Give each prompt a unique id.",
            )
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InvalidRequest(f"{name} contains no prompts.", hint=_FORM)
    return prompts


class _BadLine(Exception):
    """The fault of a line, as the end of a sentence that starts with its number."""


def _parse_line(line: str, number: int) -> BenchPrompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: a line of ten thousand brackets
        raise _BadLine("is not JSON") from error
    match record:
        case {"prompt": _, "turns": _}:
            raise _BadLine('has both "prompt" and "turns"')
        case {"prompt": str(text)}:
            turns = [text]
        case {"turns": [str(), *_] as turns} if all(isinstance(each, str) for each in turns):
            pass
        case _:
            raise _BadLine('has neither a text as "prompt" nor a list of texts as "turns"')
    if not all(each.strip() for each in turns):
        raise _BadLine("has an empty text")
    if any(_SURROGATE.search(each) for each in turns):
        raise _BadLine("has half a surrogate pair")
    identity, category = record.get("question_id", record.get("id", number)), record.get("category", OWN)
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise _BadLine("has an id that is neither text nor a whole number")
    if not isinstance(category, str):
        raise _BadLine("has a category that is not text")
    return BenchPrompt(str(identity), category, tuple(turns))
