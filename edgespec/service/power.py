"""Where the machine's power comes from."""

from __future__ import annotations

import psutil


def is_on_battery() -> bool:
    """Whether the machine runs on its battery; False where that is not known."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False
