"""Progress and notices as lines of a log."""

from __future__ import annotations

import logging

LOG = logging.getLogger("edgespec")


class LogReporter:
    """Logs notices at WARNING and progress at INFO, every 10%."""

    def __init__(self) -> None:
        self._logged: dict[str, int] = {}

    def notice(self, text: str) -> None:
        LOG.warning(text)

    def download(self, name: str, done: int, total: int) -> None:
        self._log(f"downloading {name}", done / max(total, 1))

    def loading(self, name: str, fraction: float) -> None:
        self._log(f"loading {name}", fraction)

    def _log(self, action: str, fraction: float) -> None:
        tenths = int(10 * fraction)
        if tenths != self._logged.get(action):
            self._logged[action] = tenths
            LOG.info("%s: %d%%", action, 10 * tenths)
