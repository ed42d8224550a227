"""A loaded model: its engine, its description, and the store of what the autopilot learns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from edgespec.autopilot.stats import DraftStats
from edgespec.autopilot.store import ProfileStore, Setting
from edgespec.backends.fixed_width import FixedWidthModel
from edgespec.backends.settings import RuntimeSettings
from edgespec.engine.engine import Engine
from edgespec.engine.model_info import ModelInfo
from edgespec.engine.pending_measurements import ASSUMED, PROFILE_S, PendingMeasurements
from edgespec.machines.memory import DeviceMemory
from edgespec.models.adapted import is_outdated, mark_seen
from edgespec.models.file_facts import describe_file
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan
from edgespec.models.registry import SamplingDefaults


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine with what was loaded for it, and its ProfileStore.

    info      as it was when the model had been loaded, so that it can be read while the model is being closed;
              `describe` gives the present values
    store     None for the toy runtime
    settings  of the runtime, as measured; None if nothing was measured
    config    what was asked for
    plan      what was loaded, with the versions of adapted drafts; None for the toy runtime
    pending   what was not measured at the load
    """

    engine: Engine
    info: ModelInfo
    target_path: Path
    key: Setting
    store: ProfileStore | None
    settings: RuntimeSettings | None
    config: LoadConfig
    plan: Plan | None
    pending: PendingMeasurements = field(default_factory=PendingMeasurements)

    def describe(self, devices: tuple[DeviceMemory, ...]) -> ModelInfo:
        """`info` with the values that change while the model is open. It reads nothing of the runtime."""
        engine = self.engine
        return replace(
            self.info,
            plain_speed=1 / engine.draft_stats.costs.seconds(1) if self.has_costs else None,
            speculation=engine.speculation,
            is_paused=engine.is_paused,
            devices=devices,
            max_concurrency=engine.max_concurrency,
            remembered=engine.memory.space("").n_tokens if engine.memory is not None else None,
        )

    @property
    def is_outdated(self) -> bool:
        """Whether another version of an adapted draft is in use since the draft was loaded or `mark_seen`."""
        return self.plan is not None and any(map(is_outdated, self.plan.drafters))

    def mark_seen(self) -> LoadedModel:
        """The same, which is not outdated until another version is in use than now."""
        if self.plan is None:
            return self
        return replace(self, plan=replace(self.plan, drafters=tuple(map(mark_seen, self.plan.drafters))))

    @property
    def has_costs(self) -> bool:
        """Whether what the autopilot knows was measured."""
        return self.engine.has_draft_stats and not self.pending.costs

    def measure_missing(self, *, later: bool = False) -> None:
        """Give the engine what is stored of these models; measure now what the autopilot needs and is not stored, or
        `later`, with assumed costs until then.
        """
        engine, speculation = self.engine, self.engine.speculation
        if not speculation.drafters or self.store is None:
            return
        stored = self.store.load(self.key)
        if stored is not None:
            engine.draft_stats = stored  # for a fixed length too: /spec auto may come later
            if speculation.is_adaptive:
                engine.measure_missing()
        elif speculation.is_adaptive:
            profile = ASSUMED if later else engine.measure(PROFILE_S)
            known = self.store.load_newest()  # other settings change the costs, but not the acceptance
            engine.draft_stats = DraftStats(profile) if known is None else known.with_costs(profile)
            self.pending.costs = later

    def measure_pending(self) -> None:
        """Measure what the load has left out. Raises Cancelled."""
        if self.plan is not None:
            self.pending.measure(self.engine, self.target_path, self.plan)

    def save_stats(self) -> None:
        """Store what the autopilot has learned, for the next process."""
        if self.store is not None and self.has_costs:
            self.store.save(self.key, self.engine.draft_stats)


def describe_model(engine: Engine, name: str, planned: Plan | None, settings: RuntimeSettings | None) -> ModelInfo:
    """The description of a model that has been loaded; `planned` is None for the toy runtime."""
    target = engine.target
    return ModelInfo(
        name=name,
        backend=planned.backend if planned is not None else "toy",
        drafters={name: each.label for name, each in engine.drafters.items()},
        sampling=planned.sampling if planned is not None else SamplingDefaults(),
        chat_template=target.chat_template,
        fit=planned.fit if planned is not None else None,
        plain_speed=None,
        context_size=target.context_size,
        speculation=engine.speculation,
        is_paused=engine.is_paused,
        devices=(),
        max_concurrency=engine.max_concurrency,
        no_batching_reason=target.no_batching_reason,
        settings=settings.override(planned.options) if settings is not None and planned is not None else settings,
        exact_width=target.width if isinstance(target, FixedWidthModel) else None,
        template=engine.prompts.template.profile,
        facts=describe_file(planned.metadata) if planned is not None else None,
    )
