"""Probes on disk: how a head is read beside a target, by the digests of both."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.autopilot.store import calibration_folder, load_entry, save_entry
from edgespec.backends import BackendName
from edgespec.engine.head_probe import ProbeResult
from edgespec.formats.fingerprint import fingerprint_weights
from edgespec.formats.heads import HeadSpec

_VERSION = 2  # of the file format and of the probe


class ProbeStore:
    """The file of a pair. What the head's file says is part of the key."""

    def __init__(self, target: Path, head: Path) -> None:
        """Raises CacheError if the weights cannot be read."""
        self.path = calibration_folder() / f"head-{fingerprint_weights(target)}-{fingerprint_weights(head)}.json"

    def load(self, backend: BackendName, spec: HeadSpec) -> ProbeResult | None:
        """What was found for `spec`; None if nothing was. A damaged entry reads as None."""
        from pydantic import TypeAdapter

        read = TypeAdapter(ProbeResult).validate_python
        return load_entry(self.path, "probe", _setting(backend, spec), read)

    def save(self, backend: BackendName, spec: HeadSpec, result: ProbeResult) -> None:
        """Store `result`. If the folder cannot be written, the next load probes again."""
        save_entry(self.path, {"setting": _setting(backend, spec), "probe": asdict(result)}, "probe")


def _setting(backend: BackendName, spec: HeadSpec) -> dict[str, Any]:
    """Returns the key of an entry as JSON reads it back."""
    setting: dict[str, Any] = json.loads(json.dumps({"version": _VERSION, "backend": backend, "stated": asdict(spec)}))
    return setting
