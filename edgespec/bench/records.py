"""The records of a benchmark's raw data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.autopilot.profile import DraftCost
from edgespec.bench.divergence import Divergence
from edgespec.core.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Header:
    """The conditions of a benchmark."""

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

    def facts(self) -> dict[str, str]:
        """The same as text."""
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
    rows: Mapping[int, float]
    drafts: Mapping[str, DraftCost]


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    bound_s  seconds for its rounds by the measured cost curve
    fork     where a greedy output differs from plain decoding's; an error unless it is a near-tie
    """

    arm: str
    prompt: str
    category: str
    temperature: float
    repeat: int
    metrics: Metrics
    bound_s: float | None
    fork: Divergence | None


Record = Header | Cost | Run


def describe_record(record: Record) -> dict[str, Any]:
    """A line of the raw data, as JSON has it."""
    found = {"kind": type(record).__name__.lower(), **asdict(record)}
    if isinstance(record, Run) and record.fork is not None:
        found["fork"] = record.fork.describe()
    return found
