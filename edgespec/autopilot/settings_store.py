"""Measured runtime settings on disk, by model, machine, runtime and the user's own options."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.autopilot.store import calibration_folder, current_setting, load_entry, save_entry
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.backends.settings import RuntimeSettings, measured_lengths
from edgespec.formats.fingerprint import fingerprint_weights


class SettingsStore:
    """The file of one model. The weights are read when its path is first needed."""

    def __init__(self, model: Path) -> None:
        self._model = model

    @cached_property
    def path(self) -> Path:
        """Raises CacheError if the model's files cannot be read."""
        return calibration_folder() / f"settings-{fingerprint_weights(self._model)}.json"

    def load(self, backend: BackendName, options: LoadOptions) -> RuntimeSettings | None:
        """What was measured for a model loaded with `options`, the user's; None if nothing was.

        A damaged entry reads as None.
        """
        return load_entry(self.path, "chosen", _setting(backend, options), RuntimeSettings.from_dict)

    def save(self, backend: BackendName, options: LoadOptions, settings: RuntimeSettings) -> None:
        """Store `settings`. If the folder cannot be written, the next run has to measure again."""
        save_entry(self.path, {"setting": _setting(backend, options), "chosen": asdict(settings)}, "chosen")


def _setting(backend: BackendName, options: LoadOptions) -> dict[str, Any]:
    """What the measurement depends on; `options` have a definite context size."""
    lengths = measured_lengths(options, options.context_for(None))
    return {**current_setting(backend, options), "lengths": list(lengths)}
