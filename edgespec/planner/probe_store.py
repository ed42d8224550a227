"""Probes on disk: how a head is read beside a target, by the digests of both."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from edgespec.backends import BackendName
from edgespec.controller.store import calibration_folder, read_entries, save_entry
from edgespec.formats.fingerprint import fingerprint_weights
from edgespec.formats.heads import HeadSpec
from edgespec.planner.head_probe import ProbeResult, Trial

_VERSION = 1  # of the file format and of the probe


class ProbeStore:
    """The file of a pair. What the head's file says is part of the key."""

    def __init__(self, target: Path, head: Path) -> None:
        """Raises CacheError if the weights cannot be read."""
        self.path = calibration_folder() / f"head-{fingerprint_weights(target)}-{fingerprint_weights(head)}.json"

    def load(self, backend: BackendName, spec: HeadSpec) -> ProbeResult | None:
        """What was found for `spec`, without the trials; None if nothing was. A damaged entry reads as None."""
        for entry in read_entries(self.path, "probe"):
            if entry["setting"] == _setting(backend, spec):
                try:
                    return _from_dict(spec, entry["probe"])
                except (KeyError, TypeError, ValueError):
                    return None
        return None

    def save(self, backend: BackendName, spec: HeadSpec, result: ProbeResult) -> None:
        """Store `result`. If the folder cannot be written, the next load probes again."""
        save_entry(self.path, {"setting": _setting(backend, spec), "probe": _to_dict(spec, result)}, "probe")


def _to_dict(spec: HeadSpec, result: ProbeResult) -> dict[str, Any]:
    """`result` as JSON has it, without the trials; readings are what differs from `spec`, what the head's file says."""

    def trial(tried: Trial) -> dict[str, Any]:
        stated = asdict(spec)
        reading = {name: value for name, value in asdict(tried.spec).items() if value != stated[name]}
        return {"reading": reading, "agreement": list(tried.agreement), "positions": tried.positions}

    return {
        "chosen": trial(result.chosen),
        "stated": trial(result.stated) if result.stated else None,
        "lookups": result.lookups,
        "own": list(result.own),
        "seconds": result.seconds,
    }


def _from_dict(spec: HeadSpec, found: dict[str, Any]) -> ProbeResult:
    """Raises KeyError, TypeError, ValueError for values of other types."""

    def trial(tried: dict[str, Any]) -> Trial:
        reading = {name: _check(spec, name, value) for name, value in dict(tried["reading"]).items()}
        return Trial(replace(spec, **reading), _pair(tried["agreement"]), int(tried["positions"]))

    stated = None if found["stated"] is None else trial(found["stated"])
    lookups, own, seconds = float(found["lookups"]), _pair(found["own"]), float(found["seconds"])
    return ProbeResult(stated, trial(found["chosen"]), lookups, own, seconds)


def _check(spec: HeadSpec, name: str, value: object) -> Any:
    if name == "layers" and isinstance(value, list) and all(type(each) is int for each in value):
        return tuple(value)
    if name in {each.name for each in fields(spec)} and isinstance(value, bool):
        return value
    raise ValueError(f"{name} is {value!r}")


def _pair(values: list[float]) -> tuple[float, float]:
    first, second = values
    return float(first), float(second)


def _setting(backend: BackendName, spec: HeadSpec) -> dict[str, Any]:
    """As JSON reads it back."""
    setting: dict[str, Any] = json.loads(json.dumps({"version": _VERSION, "backend": backend, "stated": asdict(spec)}))
    return setting
