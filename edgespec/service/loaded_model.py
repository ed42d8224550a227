"""A loaded model: its engine, its description, and the store of what the autopilot learns."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.backends import Model
from edgespec.backends.devices import DeviceMemory
from edgespec.backends.fixed_width import FixedWidthModel, check_width, rank_widths
from edgespec.backends.options import EXACT_WIDTHS, Adjustable, RuntimeSettings
from edgespec.controller.profiler import measure_rows
from edgespec.controller.store import (
    ProfileKey,
    ProfileStore,
    SettingsStore,
    calibration_folder,
    load_entry,
    save_entry,
)
from edgespec.core.protocols import CheckCancelled
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.formats.mlx_folder import fingerprint_weights
from edgespec.memory.memory import Memory
from edgespec.planner.draft_finder import is_outdated, mark_seen
from edgespec.planner.plan import LoadConfig, MemoryOptions, Plan, Reporter
from edgespec.registry.tokenizer_compat import identify_tokenizer
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


# The memory of earlier texts for the vocabulary of a model.


def open_memory(options: MemoryOptions | None, target: Model, name: str, reporter: Reporter) -> Memory | None:
    """The texts of all models with the vocabulary of `target`, which its user calls `name`; None without `options`.

    A new folder is told of.
    """
    if options is None:
        return None
    if not options.folder.exists():
        reporter.notice(
            f"Texts are kept in {options.folder} to draft later ones faster; `edgespec memory clear` removes them,"
            " --no-memory keeps none."
        )
    memory = Memory(options.folder, identify_tokenizer(target.tokenizer), options.limit_bytes)
    memory.name_model(name)
    return memory


# How a loaded target keeps the promise of --exact: as the runtime does it, or by forwards of one width.


_MEASURE_S = 1.0
_MIN_CONTEXT = 8  # tokens of a text, beside the rows of a forward


def keep_exact(
    target: Model, path: Path, planned: Plan, reporter: Reporter, check: CheckCancelled
) -> tuple[Model, Plan]:
    """`target` as --exact asks for it, and `planned`, the user's, with the width of its forwards in the options.

    The width is the user's, else the stored one, else the cheapest by measurement, which is stored for later loads.
    Raises InvalidRequest for a width at which drafts would change the text, BackendError, CacheError, Cancelled.
    """
    options = planned.options
    if options.exact and not target.is_row_invariant:
        key = ProfileKey.current(planned.backend, options)
        setting = asdict(replace(key, threads=options.threads))  # idle cores would make another text of another day
        store = calibration_folder() / f"{fingerprint_weights(path)}-exact.json"
        width = options.exact_width or load_entry(store, "exact", setting, _read_width)
        _check_room(target, width or min(EXACT_WIDTHS))
        if width is None:
            width = _measure(target, check)
            save_entry(store, {"setting": setting, "exact": {"width": width}}, "exact")
            _check_room(target, width)
        elif options.exact_width and not check_width(target, width, check):
            raise InvalidRequest(
                f"with forwards of {width} rows drafts would change this model's text.", hint="Use --exact-width 1."
            )
        target = FixedWidthModel(target, width)
        reporter.notice(_describe(width))
    if isinstance(target, FixedWidthModel):
        planned = replace(planned, options=replace(options, exact_width=target.width))
    return target, planned


def _check_room(target: Model, width: int) -> None:
    if target.context_size < width + _MIN_CONTEXT:
        raise InvalidRequest(
            f"a context of {target.context_size} tokens has no room for a text beside forwards of {width} rows.",
            hint="Set a larger --ctx.",
        )


def _read_width(exact: dict[str, Any]) -> int:
    """Raises ValueError for a width that is none, KeyError."""
    width = exact["width"]
    if type(width) is not int or width not in EXACT_WIDTHS:
        raise ValueError("no width of forwards")
    return width


def _measure(target: Model, check: CheckCancelled) -> int:
    """The cheapest width at which drafts change no score."""
    with closing(target.open_session(check)) as session:
        rows_s = measure_rows(session, _MEASURE_S, check)
    return next(width for width in rank_widths(rows_s) if check_width(target, width, check))


def _describe(width: int) -> str:
    if width == 1:
        return "Every forward has 1 row for --exact, so nothing is drafted."
    return f"Every forward has {width} rows for --exact; the text depends on this number (--exact-width {width})."


# The runtime's settings for a model: stored ones, or those measured at its first load.


_SETTINGS_S = 0.4  # of measuring at the first load


def choose_settings(
    target: Model, path: Path, planned: Plan, seconds: float | None, check: CheckCancelled
) -> RuntimeSettings | None:
    """Have `target` use the stored settings, or measure them; None where the runtime's own are used.

    With `seconds` they are measured for that long, known or not; stored ones stay where that is too short. The first
    load stores the runtime's own where its time is too short: another setting is another rounding, so a model keeps
    what it began with until somebody measures again. Raises CacheError, Cancelled.
    """
    if not isinstance(target, Adjustable):
        return None
    store = SettingsStore(path)
    settings = store.load(planned.backend, planned.options)
    if settings is None or seconds is not None:
        measured = target.measure_settings(_SETTINGS_S if seconds is None else seconds, check)
        if measured is not None and (settings is None or measured.describe()):
            store.save(planned.backend, planned.options, measured)
            settings = measured
    if settings is not None:
        target.use(settings)
    return settings


def apply_settings(settings: RuntimeSettings | None, planned: Plan) -> Plan:
    """`planned` with the measured settings, which its drafts use too."""
    return replace(planned, options=settings.apply(planned.options)) if settings is not None else planned
