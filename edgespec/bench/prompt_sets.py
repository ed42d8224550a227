"""Benchmark prompts: the shipped sets by category, and a reader of JSONL files."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints

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

_Text = Annotated[str, StringConstraints(pattern=r"\S")]
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
    files = [f"{name}.jsonl" for name in CATEGORIES if categories is None or name in categories]
    return [prompt for file in files for prompt in _parse((folder / file).read_bytes(), file)]


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
    return _parse(_read(path), str(path))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a JSONL file with their numbers, without empty ones. Raises InvalidRequest."""
    return _split(_read(path), str(path))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from error
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"'{path}' is larger than {MAX_BYTES >> 20} MiB.", hint="Split it or use fewer prompts.")
    return data


def _split(data: bytes, name: str) -> Iterator[tuple[int, str]]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise InvalidRequest(f"'{name}', line {number} is not UTF-8 text.", hint="Convert it to UTF-8.") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def _parse(data: bytes, name: str) -> list[BenchPrompt]:
    """The prompts of a JSONL text; messages call it `name`."""
    lines: dict[str, int] = {}
    prompts: list[BenchPrompt] = []
    for number, line in _split(data, name):
        try:
            prompt = _parse_line(line, number)
        except ValueError as error:
            raise InvalidRequest(f"'{name}', line {number} is not a prompt.", hint=_FORM) from error
        if prompt.id in lines:
            raise InvalidRequest(
                f"'{name}', line {number} has the same id '{prompt.id}' as line {lines[prompt.id]}.",
                hint="Give each prompt a unique id.",
            )
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InvalidRequest(f"'{name}' contains no prompts.", hint=_FORM)
    return prompts


class _Line(BaseModel):
    """A line of a file: a prompt, or turns."""

    model_config = ConfigDict(strict=True)
    prompt: _Text = ""
    turns: tuple[_Text, ...] = ()
    id: str | int = Field("", validation_alias=AliasChoices("question_id", "id"))
    category: str = OWN


def _parse_line(line: str, number: int) -> BenchPrompt:
    """The prompt of a line, whose `number` is its id if it states none. Raises ValueError."""
    record = _Line.model_validate_json(line)
    if bool(record.prompt) == bool(record.turns):
        raise ValueError
    turns = record.turns or (record.prompt,)
    return BenchPrompt(str(number if record.id == "" else record.id), record.category, turns)
