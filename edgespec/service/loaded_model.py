"""A loaded model: its engine, its description, and the store of what the autopilot learns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from edgespec.backends.devices import DeviceMemory
from edgespec.backends.settings import RuntimeSettings
from edgespec.controller.store import ProfileKey, ProfileStore
from edgespec.engine.engine import Engine
from edgespec.planner.adapted import is_outdated, mark_seen
from edgespec.planner.plan import LoadConfig, Plan
from edgespec.service.client import ModelInfo


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine with the description of its models, and its ProfileStore.

    info      as it was when the model had been loaded; `describe` gives the present values
    store     None for the toy runtime
    settings  of the runtime, as measured; None where nothing was measured
    config    what was asked for
    planned   what was loaded, with the versions of adapted drafts; None for the toy runtime
    """

    engine: Engine
    info: ModelInfo
    target_path: Path
    draft_paths: tuple[Path, ...]
    key: ProfileKey
    store: ProfileStore | None
    settings: RuntimeSettings | None = None
    config: LoadConfig = field(default_factory=LoadConfig)
    planned: Plan | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether another version of an adapted draft is in use since the draft was loaded or `mark_seen`."""
        return self.planned is not None and any(map(is_outdated, self.planned.drafters))

    def mark_seen(self) -> LoadedModel:
        """The same, which is not outdated until another version is in use than now."""
        if self.planned is None:
            return self
        return replace(self, planned=replace(self.planned, drafters=tuple(map(mark_seen, self.planned.drafters))))

    def describe(self, devices: tuple[DeviceMemory, ...]) -> ModelInfo:
        """`info` with the values that change while the model is open."""
        engine = self.engine
        return replace(
            self.info,
            plain_speed=1 / engine.draft_stats.costs.seconds(1) if engine.has_draft_stats else None,
            speculation=engine.speculation,
            is_paused=engine.is_paused,
            devices=devices,
            max_concurrency=engine.max_concurrency,
            remembered=engine.memory.space("").n_tokens if engine.memory is not None else None,
        )

    def save_stats(self) -> None:
        """Store what the autopilot has learned, for the next process."""
        if self.store is not None and self.engine.has_draft_stats:
            self.store.save(self.key, self.engine.draft_stats)
