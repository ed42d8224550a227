"""A loaded model: its engine, its description, and the store of what the autopilot learns."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.autopilot.profiler import measure_rows
from edgespec.autopilot.settings_store import SettingsStore
from edgespec.autopilot.store import ProfileStore, Setting, calibration_folder, current_setting, load_entry, save_entry
from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedHead, SelfDraftSpec, Unsupported
from edgespec.backends.fixed_width import FixedWidthModel, check_width, rank_widths
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.options import EXACT_WIDTHS
from edgespec.backends.settings import RuntimeSettings
from edgespec.engine.engine import Engine
from edgespec.engine.head_probe import HeadProbe, ProbeResult, describe_reading
from edgespec.engine.model_info import ModelInfo
from edgespec.engine.probe_store import ProbeStore
from edgespec.engine.selfdraft_cache import SelfDraftCache
from edgespec.engine.selfdraft_search import EVALUATION_S, SelfDraftSearch, quick_methods
from edgespec.errors import Cancelled, DraftRefused, EdgespecError, InvalidRequest, reason_of
from edgespec.formats.fingerprint import fingerprint_weights
from edgespec.formats.heads import HeadSpec
from edgespec.machines.memory import DeviceMemory
from edgespec.machines.ranks import count_ranks
from edgespec.memory.memory import Memory
from edgespec.memory.prefixes import PrefixFiles
from edgespec.models.adapted import is_outdated, mark_seen
from edgespec.models.draft_words import AUTO, PlannedDrafter
from edgespec.models.load_config import LoadConfig, MemoryOptions
from edgespec.models.plan import Plan
from edgespec.models.registry import SamplingDefaults
from edgespec.models.tokenizer_compat import identify_tokenizer
from edgespec.progress import loading, notice


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine with what was loaded for it, and its ProfileStore.

    info      as it was when the model had been loaded, so that it can be read while the model is being closed;
              `describe` gives the present values
    store     None for the toy runtime
    settings  of the runtime, as measured; None where nothing was measured
    config    what was asked for
    planned   what was loaded, with the versions of adapted drafts; None for the toy runtime
    """

    engine: Engine
    info: ModelInfo
    target_path: Path
    key: Setting
    store: ProfileStore | None
    settings: RuntimeSettings | None
    config: LoadConfig
    planned: Plan | None

    def describe(self, devices: tuple[DeviceMemory, ...]) -> ModelInfo:
        """`info` with the values that change while the model is open. It reads nothing of the runtime."""
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

    @property
    def is_outdated(self) -> bool:
        """Whether another version of an adapted draft is in use since the draft was loaded or `mark_seen`."""
        return self.planned is not None and any(map(is_outdated, self.planned.drafters))

    def mark_seen(self) -> LoadedModel:
        """The same, which is not outdated until another version is in use than now."""
        if self.planned is None:
            return self
        return replace(self, planned=replace(self.planned, drafters=tuple(map(mark_seen, self.planned.drafters))))

    def save_stats(self) -> None:
        """Store what the autopilot has learned, for the next process."""
        if self.store is not None and self.engine.has_draft_stats:
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
    )


_NOT_IN_CELLS = (  # settings that differ from load to load, as by the memory that is free
    "threads", "batch_threads", "gpu_layers", "gpu_layers_draft", "n_cpu_moe", "device", "tensor_split",
    "override_tensor",
)  # fmt: skip


def open_prefixes(
    options: MemoryOptions | None, memory: Memory | None, key: Setting, target: Model, path: Path
) -> PrefixFiles | None:
    """The caches of earlier texts of a model, which is at `path`, in the memory's folder; None where none are kept."""
    if options is None or not options.keeps_caches or memory is None or memory.database is None:
        return None
    config = path / "config.json"
    setting = {
        **key,
        **dict.fromkeys(_NOT_IN_CELLS),
        "weights": fingerprint_weights(path) if path.exists() else path.name,  # the toy has none
        "config": config.read_text(encoding="utf-8") if config.is_file() else None,
        "context_size": target.context_size,  # on which rotary factors may depend
    }
    return PrefixFiles(options.folder, json.dumps(setting, sort_keys=True))


def open_memory(options: MemoryOptions | None, target: Model, name: str) -> Memory | None:
    """The texts of all models with the vocabulary of `target`, which its user calls `name`; None without `options`.

    A new folder is told of.
    """
    if options is None:
        return None
    is_new = not options.folder.exists()
    memory = Memory(options.folder, identify_tokenizer(target.tokenizer), options.limit_bytes)
    if is_new and memory.database is not None:
        notice(
            f"Texts are kept in {options.folder} to draft later ones faster; `edgespec memory clear` removes them,"
            " --no-memory keeps none."
        )
    memory.name_model(name)
    return memory


_MEASURE_S = 1.0
_MIN_CONTEXT = 8  # tokens of a text, beside the rows of a forward


def keep_exact(target: Model, path: Path, planned: Plan) -> tuple[Model, Plan]:
    """`target` as --exact asks for it, and `planned`, the user's, with the width of its forwards in the options.

    The width is the user's, else the stored one, else the cheapest by measurement, which is stored for later loads.
    Raises InvalidRequest for a width at which drafts would change the text, BackendError, CacheError, Cancelled.
    """
    options = planned.options
    if options.exact and not target.is_row_invariant:
        # Idle cores would make another text of another day.
        setting = {**current_setting(planned.backend, options), "threads": options.threads}
        store = calibration_folder() / f"{fingerprint_weights(path)}-exact.json"
        width = options.exact_width or load_entry(
            store, "exact", setting, lambda exact: EXACT_WIDTHS[EXACT_WIDTHS.index(exact["width"])]
        )
        if target.context_size < (width or max(EXACT_WIDTHS)) + _MIN_CONTEXT:
            raise InvalidRequest(
                f"a context of {target.context_size} tokens has no room for a text beside forwards of "
                f"{width or max(EXACT_WIDTHS)} rows.",
                hint="Set a larger --ctx.",
            )
        if width is None:
            with closing(target.open_session()) as session:
                rows_s = measure_rows(session, _MEASURE_S)
            width = next(each for each in rank_widths(rows_s) if check_width(target, each))
            save_entry(store, {"setting": setting, "exact": {"width": width}}, "exact")
        elif options.exact_width and not check_width(target, width):
            raise InvalidRequest(
                f"with forwards of {width} rows drafts would change this model's text.", hint="Use --exact-width 1."
            )
        target = FixedWidthModel(target, width)
        notice(
            f"Forwards have the width {width} for --exact (--exact-width {width}): the text depends on it, and with 1 "
            "nothing is drafted."
        )
    if isinstance(target, FixedWidthModel):
        planned = replace(planned, options=replace(options, exact_width=target.width))
    return target, planned


_SETTINGS_S = 0.4  # of measuring at the first load


def choose_settings(target: Model, path: Path, planned: Plan, seconds: float | None) -> RuntimeSettings | None:
    """Have `target` use the stored settings, or measure them; None where the runtime's own are used.

    With `seconds` they are measured for that long, known or not; stored ones stay where that is too short. The first
    load stores the runtime's own where its time is too short: another setting is another rounding, so a model keeps
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


def choose_self_draft(
    config: LoadConfig, planned: Plan, target: Model, target_path: Path, key: Setting
) -> SelfDraftSpec | None:
    """The self-draft to use; None for none.

    The layers of a requested one are searched and remembered under `key`; 'auto' takes what `search_when_idle` has
    remembered. Raises Unsupported for a requested method that the model has not, BackendError, CacheError, Cancelled.
    """
    requested = planned.self_draft
    if requested is not None and requested.kept != ():
        return requested
    cache = SelfDraftCache(target_path, planned.name)
    if requested is None:
        choice = cache.look_up(key, AUTO) if _is_open(config) else None
        return choice.method if choice is not None and choice.pays else None
    choice = cache.look_up(key, str(requested))
    if choice is None:
        notice(f"Searching the layers of {requested}, for about {EVALUATION_S:.0f} seconds; this is done once.")
        search = SelfDraftSearch(target, cache.folder, EVALUATION_S)
        with cache.trying(key, str(requested)):
            choice = search.choose([requested])
        cache.remember(key, str(requested), choice)
    notice(f"Drafting by {choice.method}: {choice.reason}.")
    return choice.method


def search_when_idle(loaded: LoadedModel) -> None:
    """Searches for a self-draft that pays and remembers the result, for later loads under 'auto'.

    Does nothing where a draft model is loaded, `edgespec draft build` compares those, or where the result is known.
    Raises Unsupported, DoesNotFit, BackendError, CacheError, Cancelled.
    """
    planned, target = loaded.planned, loaded.engine.target
    if planned is None or planned.models or planned.options.exact or not _is_open(loaded.config):
        return
    key = current_setting(planned.backend, apply_settings(loaded.settings, planned).options)
    cache = SelfDraftCache(loaded.target_path, planned.name)
    if cache.look_up(key, AUTO) is None:
        search = SelfDraftSearch(target, cache.folder, EVALUATION_S)
        with cache.trying(key, AUTO):
            cache.remember(key, AUTO, search.choose(quick_methods(planned.backend)))


def _is_open(config: LoadConfig) -> bool:
    """Returns whether a self-draft may be chosen: a model on several ranks has none."""
    return config.draft == AUTO and config.draft_max != 0 and count_ranks() == 1


def load_head(
    target: Model, drafter: PlannedDrafter, paths: tuple[Path, Path], planned: Plan,
    *, may_skip: bool) -> AttachedHead | None:  # fmt: skip
    """Attach the head of `drafter` in the reading that a probe finds, or has found, to agree best with `target`.

    `paths` are the target's and the head's. Where `may_skip`, as for one that 'auto' has found, a head that cannot be
    used is left out, with a notice, and None returned. A probe that fails is told and changes nothing.
    Raises Cancelled, and what `Model.load_head` raises.
    """
    spec, label = drafter.head, drafter.label
    assert spec is not None
    try:
        result, problem = _find_reading(target, spec, paths, planned)
        with loading(paths[1].name):
            head = target.load_head(result.chosen.spec if result else spec, paths[1])
        head.shorten()
    except EdgespecError as refusal:
        if not may_skip:
            raise
        notice(f"Drafting without {label}: {refusal.message}")
        return None
    if drafter.found:
        notice(drafter.found)
    if result is None:
        notice(f"The head {label} is read as its file says, since it could not be probed: {problem}.")
    elif result.is_corrected:
        depths = "{:.0%} and {:.0%}".format(*result.chosen.agreement)
        notice(
            f"The head is read with {describe_reading(result.chosen.spec)}, where its file says "
            f"{describe_reading(spec)}: agreement {depths} at depths 1 and 2."
        )
    return head


def _find_reading(
    target: Model, spec: HeadSpec, paths: tuple[Path, Path], planned: Plan
) -> tuple[ProbeResult | None, str]:
    """(what is stored, or is found now and stored; else None and why)"""
    store = ProbeStore(*paths)
    result = store.load(planned.backend, spec)
    if result is not None:
        return result, ""
    try:
        result = HeadProbe(target, paths[1], planned.backend).run(spec)
    except (Cancelled, Unsupported, DraftRefused):  # the last two where no reading can be run
        raise
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises, the load goes on
        return None, reason_of(error)
    store.save(planned.backend, spec, result)
    return result, ""
