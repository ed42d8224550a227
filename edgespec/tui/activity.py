"""The work that the engine does for the chat: loading a model or generating an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.core.protocols import PrefillProgress, Step
from edgespec.engine.events import Event, Finished
from edgespec.errors import NotReady
from edgespec.service.stream import Stream
from edgespec.tui.live_stats import LiveStats
from edgespec.tui.turns import Answer


@dataclass
class Activity:
    """The running job and the answer that it generates.

    job       None while the engine is idle
    answer    the widget that shows the answer; None unless one is being generated
    stats     of the current answer, else of the last one
    finished  the last event of that answer; None until it arrives, and after an error
    earlier   metrics of the part of the answer that an earlier job has generated
    """

    job: Stream[Any] | None = None
    answer: Answer | None = None
    stats: LiveStats = field(default_factory=LiveStats)
    finished: Finished | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)

    def begin_answer(self, answer: Answer, stats: LiveStats, earlier: Mapping[str, Any]) -> None:
        self.answer, self.stats, self.finished, self.earlier = answer, stats, None, earlier

    def add(self, event: Event) -> None:
        """Count an event of the answer."""
        if isinstance(event, Step):
            self.stats.add(event)
        elif isinstance(event, PrefillProgress):
            self.stats.add_prefill(event)
        elif isinstance(event, Finished):
            self.finished = event

    @property
    def is_loading(self) -> bool:
        """Whether a model or a draft is being opened."""
        return self.job is not None and self.answer is None

    def require_idle(self) -> None:
        """Raises NotReady while a job runs."""
        if self.job is not None:
            raise NotReady("the engine is busy.", hint="Wait until it is done; Esc stops it.")
