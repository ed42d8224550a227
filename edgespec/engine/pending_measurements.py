"""Measurements that a load leaves for idle time, since a request waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import Profile
from edgespec.backends.settings import LONGEST
from edgespec.engine.engine import Engine
from edgespec.engine.runtime_settings import measure_settings
from edgespec.errors import EdgespecError
from edgespec.models.plan import Plan

PROFILE_S = 0.4  # seconds for measuring a new pair of models, or a known one under new settings
# Rows dearer than most machines', so that nothing is drafted that might not pay. Measured rounds correct them, and the
# seconds of one row with them.
ASSUMED = Profile({1: 0.05, 2: 0.08, 4: 0.13, 8: 0.23, 16: 0.43})


@dataclass
class PendingMeasurements:
    """What is not measured yet: the `costs` of forwards and drafters, and the `settings` of the runtime.

    has_failed  there was no memory: what is assumed holds until the next load
    """

    costs: bool = False
    settings: bool = False
    has_failed: bool = False

    def measure(self, engine: Engine, path: Path, planned: Plan) -> None:
        """Measure now what is pending; slots keep their caches. Raises Cancelled, after which it can be called again.

        Settings are stored for the next load: others change the rounding, so an open model keeps what it began with.
        """
        if self.has_failed:
            return
        fit = planned.fit
        try:
            if self.costs and fit.headroom > fit.kv_for(fit.context):  # a session of its own may be opened
                engine.draft_stats.costs = CostModel(engine.measure(PROFILE_S))
                self.costs = False
            if self.settings and fit.headroom > 2 * fit.kv_for(LONGEST):
                measure_settings(engine.target, path, planned)
                self.settings = False
        except EdgespecError:
            self.has_failed = True
