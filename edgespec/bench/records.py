"""The records of a benchmark, one line of JSON each; the reader checks every field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from edgespec.controller.cost_model import DraftCost
from edgespec.core.metrics import Metrics
from edgespec.errors import InvalidRequest

PLAIN, AUTOPILOT = "plain", "autopilot"  # arms that every summary refers to
_hints = cache(get_type_hints)


@dataclass(frozen=True, slots=True)
class Header:
    """The conditions of a benchmark. `label` marks models whose figures do not hold for real ones."""

    date: str
    processor: str
    system: str
    versions: dict[str, str | None]
    files: dict[str, str]
    backend: str
    model: str
    draft: str | None
    threads: int
    context_size: int
    max_tokens: int
    repeats: int
    label: str

    def facts(self) -> dict[str, str]:
        """Everything except the label, as text."""
        return {
            "model": self.model,
            "draft": self.draft or "none",
            "backend": self.backend,
            "threads": str(self.threads),
            "processor": self.processor,
            "system": self.system,
            "date": self.date,
            "context": f"{self.context_size} tokens",
            "limit": f"{self.max_tokens} tokens",
            "repeats": str(self.repeats),
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items() if version),
            "digests (size and both ends)": ", ".join(f"{name} {digest}" for name, digest in self.files.items()),
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs at one position: seconds of a target forward by rows, and of the drafters that take time, by name."""

    position: int
    rows: dict[int, float]
    drafts: dict[str, DraftCost]


@dataclass(frozen=True, slots=True)
class Divergence:
    """A greedy output that differs from plain decoding's; an error unless it is a near-tie."""

    near_tie: bool


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    bound_s   seconds for its rounds by the measured cost curve
    copied_tokens, copied_s   of the rounds where the text repeats (bench/repetition.py)
    """

    arm: str
    prompt: str
    category: str
    temperature: float
    warm: bool
    metrics: Metrics
    copied_tokens: int
    copied_s: float
    bound_s: float | None
    fork: Divergence | None


Record = Header | Cost | Run


def read_records(path: Path) -> list[Record]:
    """Read a file of records, the header first; an incomplete last line is ignored. Raises InvalidRequest."""
    try:
        lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from error
    records: list[Record] = []
    for i, (number, line) in enumerate(lines or [(1, b"")]):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            if i and i == len(lines) - 1:
                break
            raise _invalid_line(path, number, "not JSON") from None
        try:
            records.append(_parse_record(parsed, first=i == 0))
        except (ValueError, OverflowError) as error:
            raise _invalid_line(path, number, str(error)) from None
    return records


def _invalid_line(path: Path, number: int, fault: str) -> InvalidRequest:
    return InvalidRequest(f"{path}, line {number}: {fault}.", hint="Remove the line, or run the bench again.")


def _parse_record(parsed: Any, *, first: bool) -> Record:
    kinds: dict[str, type[Record]] = {"header": Header, "cost": Cost, "run": Run}
    kind = kinds.get(str(parsed.get("kind"))) if isinstance(parsed, dict) else None
    if kind is None or (kind is Header) != first:
        raise ValueError("not a cost or a run, nor a header in the first line")
    record: Record = _convert(parsed, kind)
    if isinstance(record, Cost) and (1 not in record.rows or min(record.rows.values()) <= 0):
        raise ValueError("rows must include one row, and all seconds must be above zero")
    if isinstance(record, Run) and (speed := record.metrics.tokens_per_second) is not None and speed <= 0:
        raise ValueError("tokens_per_second is not above zero")
    return record


def _convert(value: Any, kind: Any) -> Any:
    """Convert a JSON value to `kind`, a type of a record's field. Raises ValueError."""
    if isinstance(kind, UnionType):
        return None if value is None else _convert(value, get_args(kind)[0])
    if isinstance(value, dict) and isinstance(kind, type) and (hints := _hints(kind)):
        if missing := hints.keys() - value.keys():
            raise ValueError(f"{min(missing)} is missing")
        return kind(**{name: _convert(value[name], hint) for name, hint in hints.items()})
    if isinstance(value, dict) and get_origin(kind) in (dict, Mapping):
        of_key, of_value = get_args(kind)
        return {of_key(key): _convert(item, of_value) for key, item in value.items()}
    if isinstance(value, list) and get_origin(kind) is tuple:
        return tuple(_convert(item, get_args(kind)[0]) for item in value)
    if kind is float and type(value) in (int, float) and isfinite(value):
        return float(value)
    if kind in (str, int, bool) and type(value) is kind:
        return value
    raise ValueError(f"{value!r:.40} has the wrong type")
