"""Opens the engine of a LoadConfig: plan, fetch, load, profile. Runs on the thread that will use the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgespec.autopilot.store import ProfileStore, current_setting
from edgespec.backends import Model, require
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.settings import RuntimeSettings
from edgespec.engine.engine import Engine
from edgespec.engine.exact import keep_exact
from edgespec.engine.ignored_options import find_ignored_options
from edgespec.engine.load_drafter import load_drafters, load_weights
from edgespec.engine.loaded_drafter import identify_drafters
from edgespec.engine.loaded_model import LoadedModel, describe_model
from edgespec.engine.open_memory import open_memory, open_prefixes
from edgespec.engine.open_toy import open_toy
from edgespec.engine.runtime_settings import apply_settings, choose_settings, find_settings
from edgespec.engine.selfdraft_choice import choose_self_draft, set_self_draft
from edgespec.engine.team import check_ranks, load_leading
from edgespec.errors import EdgespecError
from edgespec.machines.ranks import count_ranks
from edgespec.memory.memory import Memory
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan
from edgespec.models.plan import plan as make_plan
from edgespec.models.registry import Registry, load_registry
from edgespec.models.resolve import fetch_source
from edgespec.progress import notice
from edgespec.text.chat_template import RENDERER


@dataclass(frozen=True, slots=True)
class Target:
    """A target that is open, with what stays the same whatever drafts for it.

    path      of its file or folder
    settings  of the runtime, as measured; None if it has none to choose
    memory    the earlier texts of its vocabulary; None if none are kept
    """

    model: Model
    path: Path
    settings: RuntimeSettings | None
    memory: Memory | None


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads models from the registry and the hub of this machine. Every method raises any EdgespecError, Cancelled.

    settings_s  seconds for measuring the runtime's settings again; None: they are measured only if they are not known
    measures_later  whether what is not known is measured in idle time, see PendingMeasurements
    """

    settings_s: float | None = None
    measures_later: bool = False
    registry: Registry = field(default_factory=load_registry)
    hub: Hub = field(default_factory=Hub.from_environment)

    def load(self, config: LoadConfig) -> LoadedModel:
        """Load a model and its draft; downloads what is missing."""
        if config.backend == "toy":
            return open_toy(config)
        RENDERER.start()  # it is ready when the model is loaded
        plan = self.plan(config)
        config.speculate(each.spec for each in plan.drafters)  # refuse wrong options before a load
        path = fetch_source(plan.target, self.hub)
        with ExitStack() as undo:
            model = undo.enter_context(closing(_load_target(path, plan)))
            if self.measures_later:
                settings = find_settings(model, path, plan)
            else:
                settings = choose_settings(model, path, plan, self.settings_s)
            if (memory := open_memory(config.memory, model, plan.name)) is not None:
                undo.callback(memory.close)
            loaded = self._add_drafters(Target(model, path, settings, memory), config, plan)
            undo.callback(loaded.engine.release_draft)
            for text in find_ignored_options(loaded.engine.target, loaded.engine.speculation, plan, config):
                notice(text)
            loaded.measure_missing(later=self.measures_later)
            loaded.pending.settings = settings is None and self.measures_later
            undo.pop_all()
        return loaded

    def prepare(self, config: LoadConfig, opened: LoadedModel) -> None:
        """Raise what `load` raises before it reads weights, as if `opened` were closed; download what is missing."""
        if config.backend != "toy":
            for source in self.plan(config, opened.plan).sources:
                fetch_source(source, self.hub)

    def change_draft(self, loaded: LoadedModel, config: LoadConfig) -> LoadedModel:
        """Load another draft for the same target, which is not loaded again.

        On failure `loaded` is unchanged, but its slots may have lost their caches.
        """
        engine, opened = loaded.engine, loaded.plan
        if opened is None:  # only the toy runtime has no plan
            return open_toy(config, engine.memory)
        config = replace(config, backend=opened.backend)
        plan = self.plan(config, opened, stays=True)
        target = Target(engine.target, loaded.target_path, loaded.settings, engine.memory)
        changed = self._add_drafters(target, config, plan)
        changed.pending.settings = loaded.pending.settings
        with ExitStack() as undo:
            undo.callback(changed.engine.release_draft)
            loaded.save_stats()  # the new draft may be the same one
            engine.release_slots()  # they may be all that the target has
            changed.measure_missing()
            undo.pop_all()
        engine.release_draft()
        return changed

    def follow_versions(self, loaded: LoadedModel) -> LoadedModel:
        """Load the versions of adapted drafts that are in use now. On failure `loaded` is unchanged."""
        changed = self.change_draft(loaded, replace(loaded.config, force=True))  # they are as large as the present ones
        changed.engine.speculation, changed.engine.is_paused = loaded.engine.speculation, loaded.engine.is_paused
        return replace(changed, config=loaded.config)

    @contextmanager
    def open_target(self, plan: Plan) -> Iterator[tuple[Model, Path, Plan]]:
        """The target alone, its file, and the plan with its measured settings. It is closed at the end."""
        path = fetch_source(plan.target, self.hub)
        with closing(_load_target(path, plan)) as model:
            settings = choose_settings(model, path, plan, self.settings_s)
            yield model, path, apply_settings(settings, plan)

    def plan(self, config: LoadConfig, opened: Plan | None = None, *, stays: bool = False) -> Plan:
        """The plan of a load; `opened` is in memory, and `stays` there or makes room."""
        planned = make_plan(config, self.registry, self.hub, opened=opened, stays=stays)
        check_ranks(planned)
        require(planned.backend)
        return planned

    def _add_drafters(self, target: Target, config: LoadConfig, plan: Plan) -> LoadedModel:
        """`_build`, if necessary with the base drafts instead of adapted ones that cannot be loaded."""
        try:
            return self._build(target, config, plan)
        except EdgespecError as refusal:
            if not any(each.card for each in plan.drafters):
                raise
            notice(f"Drafting without what was adapted: {refusal.message}")
        base = replace(config, backend=plan.backend, adapted=None, force=True)
        return self._build(target, config, self.plan(base, plan, stays=True))

    def _build(self, target: Target, config: LoadConfig, asked: Plan) -> LoadedModel:
        """Load the drafters of a plan and put the engine together; they are freed again if it refuses one."""
        path, settings, memory = target.path, target.settings, target.memory
        chosen = apply_settings(settings, asked)
        if isinstance(target.model, LlamaModel):
            target.model.allow_tree_cache(allowed=chosen.options.tree_cache)  # another draft may need one, or none
        key = current_setting(chosen.backend, chosen.options)
        method = choose_self_draft(config, chosen, target.model, path, key)
        model, plan = keep_exact(target.model, path, asked)
        plan = apply_settings(settings, plan)
        drafters = load_drafters(set_self_draft(plan.drafters, method), model, path, plan, self.hub, config)
        with ExitStack() as undo:
            for each in drafters:
                undo.callback(each.close)
            speculation = config.speculate(each.spec for each in drafters)
            prefixes = open_prefixes(config.memory, memory, key, model, path)
            engine = Engine(model, drafters, speculation, plan.options.caches, memory, prefixes)
            engine.is_paused = config.is_paused
            store = ProfileStore(path, *identify_drafters(drafters, self.hub))
            key = {**key, "exact_width": plan.options.exact_width}
            kept = replace(asked, drafters=tuple(each.plan for each in drafters))
            info = describe_model(engine, kept.name, kept, settings)
            undo.pop_all()
        if info.template.tools == "own" and info.template.call_format is None:
            notice(f"Tools: {info.template.tools_notice}")
        return LoadedModel(engine, info, path, key, store, settings, config, kept)


def _load_target(path: Path, plan: Plan) -> Model:
    if count_ranks() > 1:
        return load_leading(plan.target, path, plan.options)
    return load_weights(path, plan)
