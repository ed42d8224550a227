"""Settings of the runtime: stored ones, or measured at the first load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.autopilot.settings_store import SettingsStore
from edgespec.backends import Model
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.settings import RuntimeSettings
from edgespec.models.plan import Plan

_SETTINGS_S = 0.4  # of measuring at the first load


def choose_settings(target: Model, path: Path, planned: Plan, seconds: float | None) -> RuntimeSettings | None:
    """Have `target` use the stored settings, or measure them; None if the runtime's own are used.

    With `seconds` they are measured for that long, known or not; stored ones stay if that is too short. The first
    load stores the runtime's own if its time is too short: another setting is another rounding, so a model keeps
    what it began with until somebody measures again. Raises CacheError, Cancelled.
    """
    if not isinstance(target, LlamaModel):  # which alone has settings
        return None
    store = SettingsStore(path)
    settings = store.load(planned.backend, planned.options)
    if settings is None or seconds is not None:
        measured = target.measure_settings(_SETTINGS_S if seconds is None else seconds)
        if measured is not None and (settings is None or measured.describe()):
            store.save(planned.backend, planned.options, measured)
            settings = measured
    if settings is not None:
        target.use(settings)
    return settings


def apply_settings(settings: RuntimeSettings | None, planned: Plan) -> Plan:
    """`planned` with the measured settings, which its drafts use too."""
    return replace(planned, options=settings.apply(planned.options)) if settings is not None else planned
