"""What was measured and learned of models on this machine, kept between runs with the settings it holds for."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from edgespec.backends import BackendName
from edgespec.backends.options import KvType
from edgespec.controller.stats import DraftStats
from edgespec.errors import CacheError
from edgespec.files import write_atomically

_VERSION = 2  # of the file's form and of what is measured
_ENTRIES = 8  # settings kept for a pair of models
_ENDS = 2**20  # bytes of each end of a weights file that its fingerprint reads


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What costs depend on, beside the models."""

    version: int
    processor: str
    runtime: str  # package and version
    threads: int | None
    gpu_layers: int | None
    kv_type: KvType
    flash_attention: bool | None
    exact: bool

    @staticmethod
    def current(
        backend: BackendName,
        *,
        threads: int | None,
        gpu_layers: int | None,
        kv_type: KvType,
        flash_attention: bool | None,
        exact: bool,
    ) -> ProfileKey:
        """The setting on this machine with the packages installed."""
        package = {"llamacpp": "llama-cpp-python", "mlx": "mlx-lm", "toy": "edgespec"}[backend]
        runtime = f"{package} {importlib.metadata.version(package)}"
        return ProfileKey(_VERSION, processor_name(), runtime, threads, gpu_layers, kv_type, flash_attention, exact)

    def difference(self, other: dict[str, Any]) -> str:
        """What an `other` setting had otherwise, in words."""
        mine = asdict(self)
        found = (
            f"{name.replace('_', ' ')} {other.get(name)} instead of {value}"
            for name, value in mine.items()
            if other.get(name) != value
        )
        return ", ".join(found) or "another version of edgespec"


class ProfileStore:
    """The file of a target and perhaps its draft, whose own files are read when it is first asked for."""

    def __init__(self, target: Path, draft: Path | None, self_draft: str = "") -> None:
        """`self_draft`: how the target drafts for itself, if it does."""
        self._models = {"target": target} if draft is None else {"target": target, "draft": draft}
        self._self_draft = self_draft

    @cached_property
    def digests(self) -> dict[str, str]:
        """The models' fingerprints by role and file name. Raises CacheError where they cannot be read."""
        return {f"{role} {path.name}": fingerprint_weights(path) for role, path in self._models.items()}

    @cached_property
    def path(self) -> Path:
        """Raises CacheError where the models' files cannot be read."""
        name = hashlib.sha256("+".join([*self.digests.values(), self._self_draft]).encode()).hexdigest()
        return calibration_folder() / f"{name[:24]}.json"

    def load(self, setting: ProfileKey) -> DraftStats | str | None:
        """What is known under `setting`; in words what differs where something is known under another; or None."""
        entries = self._entries()
        for entry in entries:
            if entry["setting"] == asdict(setting):
                try:
                    return DraftStats.from_dict(entry["experience"])
                except ValueError:
                    return None  # damaged: measured again, and written over
        return setting.difference(entries[0]["setting"]) if entries else None

    def save(self, setting: ProfileKey, draft_stats: DraftStats) -> None:
        """Keep it for next time; a folder that cannot be written to costs the next run a measurement, no more."""
        kept = [entry for entry in self._entries() if entry["setting"] != asdict(setting)][: _ENTRIES - 1]
        entries = [{"setting": asdict(setting), "experience": draft_stats.to_dict()}, *kept]
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"entries": entries}))

    def _entries(self) -> list[dict[str, Any]]:
        try:
            text = self.path.read_text(encoding="utf-8")
            found = json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=_finite)["entries"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        shape = {"setting": dict, "experience": dict}
        return [
            entry
            for entry in (found if isinstance(found, list) else ())
            if isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in shape.items())
        ]


def _finite(text: str) -> float:
    """A number that can be calculated with; raises ValueError for NaN, and for what is too large."""
    if not isfinite(number := float(text)):
        raise ValueError("no number")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def calibration_folder() -> Path:
    """Where calibrations are kept: EDGESPEC_CACHE_DIR, else the platform's folder for caches."""
    import platformdirs

    stated = os.environ.get("EDGESPEC_CACHE_DIR")
    return (Path(stated) if stated else platformdirs.user_cache_path("edgespec")) / "calibration"


def fingerprint_weights(model: Path) -> str:
    """A digest of a weights file's size and both ends, or of those of a folder. Raises CacheError.

    A whole file of 40 GB would take longer to read than the measurement takes.
    """
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    digest = hashlib.sha256()
    try:
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name if model.is_dir() else ''}:{size};".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_ENDS))
                opened.seek(max(0, size - _ENDS))
                digest.update(opened.read(_ENDS))
    except OSError as error:
        raise CacheError(f"{model} cannot be read: {error.strerror}.", hint="Check its permissions.") from error
    return digest.hexdigest()[:16]


def describe_machine() -> dict[str, Any]:
    """Processor, system and versions: what every figure has to carry."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("edgespec", "llama-cpp-python", "mlx-lm"):
        versions[package] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"processor": processor_name(), "system": f"{platform.system()} {platform.machine()}", "versions": versions}


def processor_name() -> str:
    """The processor's name, as the system gives it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
