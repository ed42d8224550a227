"""Settings of the runtime: stored ones, or measured at the first load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.autopilot.settings_store import SettingsStore
from edgespec.backends import Model
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.settings import RuntimeSettings
from edgespec.models.plan import Plan

_SETTINGS_S = 0.4  # seconds for measuring at the first load


def find_settings(target: Model, path: Path, planned: Plan) -> RuntimeSettings | None:
    """Have `target` use the stored settings; None if there are none, or its runtime has none to choose."""
    if not isinstance(target, LlamaModel):  # which alone has settings
        return None
    settings = SettingsStore(path).load(planned.backend, planned.options)
    if settings is not None:
        target.use(settings)
    return settings


def measure_settings(target: Model, path: Path, planned: Plan, seconds: float | None = None) -> RuntimeSettings | None:
    """Measure and store the settings, for `seconds` or a usual time; None if there is nothing to choose.

    If the time is too short to measure any, stored settings stay, and where none are stored the runtime's own are:
    other settings round otherwise, so a model keeps what it began with until somebody measures again. Raises
    CacheError, Cancelled.
    """
    if not isinstance(target, LlamaModel):
        return None
    store = SettingsStore(path)
    measured = target.measure_settings(_SETTINGS_S if seconds is None else seconds)
    known = store.load(planned.backend, planned.options)
    if measured is None or (known is not None and not measured.describe()):
        return known
    store.save(planned.backend, planned.options, measured)
    return measured


def choose_settings(target: Model, path: Path, planned: Plan, seconds: float | None) -> RuntimeSettings | None:
    """Have `target` use the stored settings, or measure them, for `seconds` if given; None for the runtime's own.

    Raises CacheError, Cancelled.
    """
    settings = find_settings(target, path, planned)
    if isinstance(target, LlamaModel) and (settings is None or seconds is not None):
        settings = measure_settings(target, path, planned, seconds)
        if settings is not None:
            target.use(settings)
    return settings


def apply_settings(settings: RuntimeSettings | None, planned: Plan) -> Plan:
    """`planned` with the measured settings, which its drafts use too."""
    return replace(planned, options=settings.apply(planned.options)) if settings is not None else planned
