"""Measured runtime settings on disk, by model, machine, runtime and the user's own options."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.backends.settings import RuntimeSettings, measured_lengths
from edgespec.controller.store import ProfileKey, calibration_folder, read_entries, save_entry
from edgespec.formats.fingerprint import fingerprint_weights

_PREFIX = "settings-"


class SettingsStore:
    """The file of one model. The weights are read when its path is first needed."""

    def __init__(self, model: Path) -> None:
        self._model = model

    @cached_property
    def path(self) -> Path:
        """Raises CacheError if the model's files cannot be read."""
        return calibration_folder() / f"{_PREFIX}{fingerprint_weights(self._model)}.json"

    def load(self, backend: BackendName, options: LoadOptions) -> RuntimeSettings | None:
        """What was measured for a model loaded with `options`, the user's; None if nothing was.

        A damaged entry reads as None.
        """
        setting = _setting(backend, options)
        for entry in read_entries(self.path, "chosen"):
            if entry["setting"] == setting:
                try:
                    return RuntimeSettings.from_dict(entry["chosen"])
                except ValueError:
                    return None
        return None

    def save(self, backend: BackendName, options: LoadOptions, settings: RuntimeSettings) -> None:
        """Store `settings`. If the folder cannot be written, the next run has to measure again."""
        entry = {"setting": _setting(backend, options), "chosen": settings.to_dict(), "model": self._model.name}
        save_entry(self.path, entry, "chosen")


def list_settings() -> dict[str, list[str]]:
    """Of each model with measured settings, by file name, the lines of RuntimeSettings.describe; the latest entry."""
    found: dict[str, list[str]] = {}
    for path in sorted(calibration_folder().glob(f"{_PREFIX}*.json")):
        for entry in read_entries(path, "chosen")[:1]:
            with suppress(ValueError):
                if lines := RuntimeSettings.from_dict(entry["chosen"]).describe():
                    found[str(entry.get("model", path.stem))] = lines
    return found


def _setting(backend: BackendName, options: LoadOptions) -> dict[str, Any]:
    """What the measurement depends on; `options` have a definite context size."""
    lengths = measured_lengths(options, options.context_for(None))
    return {**asdict(ProfileKey.current(backend, options)), "lengths": list(lengths)}
