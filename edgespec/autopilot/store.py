"""Draft statistics on disk: kept between runs, for a pair of models on this machine under the same settings."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from edgespec.autopilot.stats import DraftStats
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions, idle_cores
from edgespec.errors import EdgespecError
from edgespec.files import lock_file, write_atomically
from edgespec.folders import cache_folder
from edgespec.formats.fingerprint import fingerprint_weights
from edgespec.machines.ranks import count_ranks

_VERSION = 4  # of the file format and of the measurement
_MAX_ENTRIES = 8  # keys kept for a pair of models
_LOCK = ".lock"  # of a folder of entries, while one is saved
T = TypeVar("T")
Setting = dict[str, Any]
"""What costs depend on, apart from the models, as JSON has it."""

_OPTIONS = (  # load options that a Setting holds unchanged
    "gpu_layers", "kv_type", "flash_attention", "exact", "batch_threads", "exact_width", "gpu_layers_draft",
    "n_cpu_moe", "tensor_split", "override_tensor",
)  # fmt: skip


def current_setting(backend: BackendName, options: LoadOptions) -> Setting:
    """The setting on this machine with the installed packages."""
    package = {"llamacpp": "llama-cpp-python", "mlx": "mlx-lm", "toy": "edgespec"}[backend]
    builds = list_builds() if backend == "llamacpp" else ""
    return {
        "version": _VERSION,
        "processor": processor_name(),
        "runtime": f"{package} {importlib.metadata.version(package)}{builds}",
        "threads": (options.threads or idle_cores()) if backend == "llamacpp" else None,
        **{name: getattr(options, name) for name in _OPTIONS},
        "device": None if options.device is None else ", ".join(options.device),
        "workers": ", ".join(options.workers) or (f"{count_ranks()} ranks" if count_ranks() > 1 else "none"),
    }


class ProfileStore:
    """The file of a target and its draft models. Their weights are read when its path is first needed."""

    def __init__(self, target: Path, drafts: Sequence[Path] = (), variant: str = "") -> None:
        """`drafts` are draft models; `variant` is what their weights do not tell, such as the way of a self-draft."""
        roles = ("draft" if i == 0 else f"draft {i + 1}" for i in range(len(drafts)))
        self._models = [("target", target), *zip(roles, drafts, strict=True)]
        self._variant = variant

    @cached_property
    def digests(self) -> dict[str, str]:
        """The models' fingerprints by role and file name. Raises CacheError if they cannot be read."""
        return {f"{role} {path.name}": fingerprint_weights(path) for role, path in self._models}

    @cached_property
    def path(self) -> Path:
        """Raises CacheError if the models' files cannot be read."""
        name = hashlib.sha256("+".join([*self.digests.values(), self._variant]).encode()).hexdigest()
        return calibration_folder() / f"{name[:24]}.json"

    def load(self, key: Setting) -> DraftStats | None:
        """The statistics under `key`; None if there are none. A damaged entry reads as None."""
        return load_entry(self.path, "experience", key, DraftStats.from_dict)

    def load_newest(self) -> DraftStats | None:
        """The statistics that were stored last on this processor, under whatever settings; None for none. Damaged
        entries, and those of another version, are passed over.
        """
        here = {"processor": processor_name(), "version": _VERSION}
        entries = [each for each in read_entries(self.path, "experience") if here.items() <= each["setting"].items()]
        found = (_read_whole(each["experience"], DraftStats.from_dict) for each in entries)
        return next((each for each in found if each is not None), None)

    def save(self, key: Setting, draft_stats: DraftStats) -> None:
        """Store the statistics under `key`. If the folder cannot be written, the next run has to measure again."""
        save_entry(self.path, {"setting": key, "experience": draft_stats.to_dict()}, "experience")


def read_entries(path: Path, content: str) -> list[dict[str, Any]]:
    """The well-formed entries of a file, latest first: objects whose 'setting' and `content` are objects."""
    try:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text, parse_float=_parse_float, parse_constant=_parse_float)["entries"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [
        entry
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and all(isinstance(entry.get(name), dict) for name in ("setting", content))
    ]


def load_entry(path: Path, content: str, setting: dict[str, Any], read: Callable[[Any], T]) -> T | None:
    """What `read` makes of a file's entry under `setting`; None without one, and for a damaged one."""
    found = (entry[content] for entry in read_entries(path, content) if entry["setting"] == setting)
    return next((_read_whole(each, read) for each in found), None)


def _read_whole(content: Any, read: Callable[[Any], T]) -> T | None:
    """What `read` makes of the content of an entry; None if that is damaged."""
    try:
        return read(content)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, EdgespecError):
        return None


def save_entry(path: Path, entry: dict[str, Any], content: str) -> None:
    """Make `entry` the first one of a file; it replaces the one with the same 'setting'. OSErrors are ignored."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(path.parent / _LOCK, wait=True):
            others = [each for each in read_entries(path, content) if each["setting"] != entry["setting"]]
            write_atomically(path, json.dumps({"entries": [entry, *others[: _MAX_ENTRIES - 1]]}))


def _parse_float(text: str) -> float:
    """Raises ValueError unless the number is finite."""
    if not isfinite(number := float(text)):
        raise ValueError("not a finite number")
    return number


def calibration_folder() -> Path:
    """The folder of the store's files."""
    return cache_folder() / "calibration"


def describe_machine() -> dict[str, Any]:
    """Processor, system and versions, which every published figure states."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("edgespec", "llama-cpp-python", "mlx-lm"):
        versions[package] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"processor": processor_name(), "system": f"{platform.system()} {platform.machine()}", "versions": versions}


def processor_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def list_builds() -> str:
    """The accelerators that llama.cpp was built for, such as ' (cuda, vulkan)', by its libraries; it is not loaded."""
    found = importlib.util.find_spec("llama_cpp")
    folder = Path(found.origin or "").parent / "lib" if found is not None else Path()
    names = {file.name.split(".")[0].partition("ggml-")[2] for file in folder.glob("*ggml-*")} - {"base", "cpu", "rpc"}
    return f" ({', '.join(sorted(names))})" if names else ""
