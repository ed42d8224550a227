"""Opens the engine of a LoadConfig: plan, fetch, load, profile. Runs on the thread that will use the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.autopilot.store import ProfileStore, current_setting
from edgespec.backends import Model, open_model, require
from edgespec.backends.attached_draft import AttachedHead
from edgespec.backends.settings import RuntimeSettings
from edgespec.drafters import SELF, drafter_specs
from edgespec.engine.drafting import LoadedDrafter
from edgespec.engine.engine import Engine
from edgespec.engine.loaded_model import (
    LoadedModel,
    apply_settings,
    choose_self_draft,
    choose_settings,
    describe_model,
    keep_exact,
    load_head,
    open_memory,
    open_prefixes,
)
from edgespec.engine.selfdraft_cache import SelfDraftCache
from edgespec.engine.selfdraft_search import make_self_draft
from edgespec.engine.team import check_ranks, load_leading
from edgespec.errors import EdgespecError
from edgespec.formats.gguf import Header
from edgespec.machines.ranks import count_ranks
from edgespec.memory.memory import Memory
from edgespec.models.adapted import describe_version, watch
from edgespec.models.draft_words import AUTO, PlannedDrafter, naming_drafters, parse_draft
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan
from edgespec.models.plan import plan as make_plan
from edgespec.models.registry import Registry, load_registry
from edgespec.models.resolve import Source, fetch_source
from edgespec.progress import loading, notice
from edgespec.text.chat_template import RENDERER


def find_ignored_options(target: Model, speculation: Speculation, planned: Plan, config: LoadConfig) -> Iterator[str]:
    """A sentence for each option that this target or runtime ignores, or that needs a draft where there is none."""
    reason = "--draft-max is 0" if speculation.drafters else "there is no draft"
    for option in ("draft_max", "draft_tree", "acceptance"):
        value = getattr(config, option)
        if speculation.is_plain and value not in (None, 0, "auto"):
            yield f"--{option.replace('_', '-')} {value} has no effect, since {reason}."
    if target.no_tree_reason is not None and speculation.is_tree:
        yield f"This model takes chains, not trees, since {target.no_tree_reason}."
    places = ("gpu_layers", "gpu_layers_draft", "n_cpu_moe", "device", "tensor_split", "override_tensor")
    facts = planned.metadata
    for option in ("threads", "batch_threads", *places, "flash_attention"):
        value, name = getattr(planned.options, option), option.replace("_", "-")
        if planned.backend == "mlx" and value is not None:
            yield f"--{name} has no effect on MLX."
        elif option == "gpu_layers_draft" and planned.options.gpu_layers == 0:
            continue  # drafts may be on a GPU all the same
        elif option in places and value and not planned.fit.memory.devices:
            yield f"--{name} has no effect, since llama.cpp uses no GPU."
        elif option == "n_cpu_moe" and value and isinstance(facts, Header) and not facts.own("expert_count"):
            yield f"--{name} has no effect, since the model has no experts."


_PROFILE_S = 0.4  # of measuring a new pair of models, or a known one under new settings


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads models from the registry and the hub of this machine. Every method raises any EdgespecError, Cancelled.

    settings_s  for measuring the runtime's settings again; None: only where they are not known
    """

    settings_s: float | None = None
    registry: Registry = field(default_factory=load_registry)
    hub: Hub = field(default_factory=Hub.from_environment)

    def load(self, config: LoadConfig) -> LoadedModel:
        """Load a model and its draft; downloads what is missing."""
        if config.backend == "toy":
            return self._load_toy(config)
        RENDERER.start()  # it is ready when the model is loaded
        planned = self.plan(config)
        _speculation(config, [each.spec.name for each in planned.drafters])  # refuse wrong options before a load
        target_path = self.fetch(planned.target)
        with ExitStack() as undo:
            target = self._load_target(target_path, planned)
            undo.callback(target.close)
            settings = choose_settings(target, target_path, planned, self.settings_s)
            if (memory := open_memory(config.memory, target, planned.name)) is not None:
                undo.callback(memory.close)
            loaded = self._build_any(config, planned, target, target_path, settings, memory)
            undo.callback(loaded.engine.release_draft)
            for text in find_ignored_options(loaded.engine.target, loaded.engine.speculation, planned, config):
                notice(text)
            self._profile(loaded)
            undo.pop_all()
        return loaded

    def prepare(self, config: LoadConfig, opened: LoadedModel) -> None:
        """Raise what `load` raises before it reads weights, as if `opened` were closed; download what is missing."""
        if config.backend != "toy":
            for source in self.plan(config, opened.planned).sources:
                self.fetch(source)

    def change_draft(self, loaded: LoadedModel, config: LoadConfig) -> LoadedModel:
        """Load another draft for the same target, which is not loaded again.

        On failure `loaded` is unchanged, but its slots may have lost their caches.
        """
        if loaded.info.backend == "toy":
            return self._load_toy(config, loaded.engine.memory)
        opened = loaded.planned
        assert opened is not None  # only the toy runtime has no plan
        config = replace(config, backend=opened.backend)
        planned = self.plan(config, opened, stays=True)
        target, memory = loaded.engine.target, loaded.engine.memory
        changed = self._build_any(config, planned, target, loaded.target_path, loaded.settings, memory)
        with ExitStack() as undo:
            undo.callback(changed.engine.release_draft)
            loaded.save_stats()  # the new draft may be the same one
            loaded.engine.release_slots()  # they may be all that the target has
            self._profile(changed)
            undo.pop_all()
        loaded.engine.release_draft()
        return changed

    def follow_versions(self, loaded: LoadedModel) -> LoadedModel:
        """Load the versions of adapted drafts that are in use now. On failure `loaded` is unchanged."""
        changed = self.change_draft(loaded, replace(loaded.config, force=True))  # they are as large as the present ones
        changed.engine.speculation, changed.engine.is_paused = loaded.engine.speculation, loaded.engine.is_paused
        return replace(changed, config=loaded.config)

    @contextmanager
    def open_target(self, planned: Plan) -> Iterator[tuple[Model, Path, Plan]]:
        """The target alone, its file, and the plan with its measured settings. It is closed at the end."""
        path = self.fetch(planned.target)
        with ExitStack() as undo:
            target = self._load_target(path, planned)
            undo.callback(target.close)
            settings = choose_settings(target, path, planned, self.settings_s)
            yield target, path, apply_settings(settings, planned)

    def plan(self, config: LoadConfig, opened: Plan | None = None, *, stays: bool = False) -> Plan:
        planned = make_plan(config, self.registry, self.hub, opened=opened, stays=stays)
        check_ranks(planned)
        require(planned.backend)
        return planned

    def fetch(self, source: Source) -> Path:
        return fetch_source(source, self.hub)

    def _load_target(self, path: Path, planned: Plan) -> Model:
        if count_ranks() > 1:
            return load_leading(planned.target, path, planned.options)
        return self.load_weights(path, planned)

    def load_weights(self, path: Path, planned: Plan) -> Model:
        if planned.network is not None:
            notice(planned.network.describe())
        with loading(path.name):
            return open_model(planned.backend, path, planned.options)

    def _build_any(self, config: LoadConfig, planned: Plan, *parts: Any) -> LoadedModel:
        """`_build`, where necessary with the base drafts in place of adapted ones that cannot be loaded."""
        try:
            return self._build(config, planned, *parts)
        except EdgespecError as refusal:
            if not any(each.card for each in planned.drafters):
                raise
            notice(f"Drafting without what was adapted: {refusal.message}")
        base = replace(config, backend=planned.backend, adapted=None, force=True)
        return self._build(config, self.plan(base, planned, stays=True), *parts)

    def _build(
        self,
        config: LoadConfig,
        asked: Plan,
        target: Model,
        target_path: Path,
        settings: RuntimeSettings | None,
        memory: Memory | None,
    ) -> LoadedModel:
        """Load what the drafters need and build the engine; all of it is freed again if the engine refuses a draft."""
        chosen = apply_settings(settings, asked)
        key = current_setting(chosen.backend, chosen.options)
        method = choose_self_draft(config, chosen, target, target_path, key)
        target, planned = keep_exact(target, target_path, asked)
        planned = apply_settings(settings, planned)
        wanted = list(planned.drafters)
        if method is not None and planned.self_draft is None:  # one that a search has found comes last
            wanted.append(PlannedDrafter(drafter_specs()[SELF]))
        drafters: list[LoadedDrafter] = []
        loaded: list[PlannedDrafter] = []
        paths: list[Path] = []
        with ExitStack() as undo:
            for each in wanted:
                path = self.fetch(each.model.source) if each.model is not None else None
                used = replace(each, self_draft=method) if each.spec.name == SELF else each
                source = self.load_source(target, target_path, used, path, planned, may_skip=config.draft == AUTO)
                if source is None and path is not None:
                    continue
                if source is not None:
                    undo.callback(source.close)
                if path is not None:
                    paths.append(path)
                drafters.append(LoadedDrafter(each.spec, used.label, source, each.mask_token))
                if each in planned.drafters:
                    loaded.append(watch(each, target_path, path, config.adapted))
            speculation = _speculation(config, [each.spec.name for each in drafters])
            prefixes = open_prefixes(config.memory, memory, key, target, target_path)
            engine = Engine(target, drafters, speculation, planned.options.caches, memory, prefixes)
            engine.is_paused = config.is_paused
            undo.pop_all()
        variants = [str(method)] if method is not None else []
        variants += [f"version {each.card.version}" for each in loaded if each.card is not None]
        store = ProfileStore(target_path, paths, "+".join(variants))
        key = {**key, "exact_width": planned.options.exact_width}
        planned = replace(asked, drafters=tuple(loaded))
        info = describe_model(engine, planned.name, planned, settings)
        if info.template.tools == "own" and info.template.call_format is None:
            notice(f"Tools: {info.template.tools_notice}")
        return LoadedModel(engine, info, target_path, key, store, settings, config, planned)

    def load_source(
        self, target: Model, target_path: Path, drafter: PlannedDrafter, path: Path | None, planned: Plan,
        *, may_skip: bool = False,
    ) -> Any:  # fmt: skip
        """What `drafter` needs, as LoadedDrafter has it; `path` is that of its draft model or head.

        None where it needs nothing, and where `may_skip` for a head that cannot be used.
        """
        if drafter.self_draft is not None:
            folder = SelfDraftCache(target_path, planned.name).folder
            with loading(str(drafter.self_draft)):
                return make_self_draft(target, drafter.self_draft, folder)
        if path is None:
            return None
        if drafter.head is None:
            source: Model | AttachedHead | None = self.load_weights(path, planned.alone)
        else:
            paths = target_path, path
            source = load_head(target, drafter, paths, planned, may_skip=may_skip)
        if source is not None and drafter.card is not None:
            notice(describe_version(drafter.card))
        return source

    def _profile(self, loaded: LoadedModel) -> None:
        """Give the engine what is stored of these models; measure now what the autopilot needs and is not stored."""
        engine, speculation = loaded.engine, loaded.engine.speculation
        if not speculation.drafters or loaded.store is None:
            return
        stored = loaded.store.load(loaded.key)
        if stored is not None:
            engine.draft_stats = stored  # for a fixed length too: /spec auto may come later
            if speculation.is_adaptive:
                engine.measure_missing()
        elif speculation.is_adaptive:
            engine.draft_stats = DraftStats(engine.measure(_PROFILE_S))

    def _load_toy(self, config: LoadConfig, memory: Memory | None = None) -> LoadedModel:
        def load(name: str) -> Model:
            return open_model("toy", Path(name), config.load)

        name = config.model or "tree"
        auto = "ngram+suffix+model" if config.memory is not None else "ngram+model"
        drafters: list[LoadedDrafter] = []
        for term in parse_draft(auto if config.draft == AUTO else config.draft):
            source: Model | None = None
            if term.spec.needs == "model":
                with naming_drafters(term.reference):
                    source = load(term.reference or "draft")
            drafters.append(LoadedDrafter(term.spec, term.reference or term.spec.name, source))
        speculation, target = _speculation(config, [each.spec.name for each in drafters]), load(name)
        memory = memory or open_memory(config.memory, target, name)
        key = current_setting("toy", config.load)
        prefixes = open_prefixes(config.memory, memory, key, target, Path(name))
        engine = Engine(target, drafters, speculation, config.load.caches, memory, prefixes)
        engine.is_paused = config.is_paused
        info = describe_model(engine, name, None, None)
        return LoadedModel(engine, info, Path(name), key, None, None, config, None)


def _speculation(config: LoadConfig, drafters: Sequence[str]) -> Speculation:
    return Speculation(tuple(drafters), config.draft_max if drafters else 0, config.draft_tree, config.acceptance)
