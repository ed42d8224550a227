"""How a loaded target keeps the promise of --exact: as the runtime does it, or by forwards of one width."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edgespec.backends import Model
from edgespec.backends.fixed_width import FixedWidthModel, check_width, rank_widths
from edgespec.backends.options import EXACT_WIDTHS
from edgespec.controller.profiler import measure_rows
from edgespec.controller.store import ProfileKey, calibration_folder, read_entries, save_entry
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import InvalidRequest
from edgespec.formats.fingerprint import fingerprint_weights
from edgespec.planner.plan import Plan, Reporter

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
        width = options.exact_width or _find_stored(store, setting)
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


def _find_stored(store: Path, setting: dict[str, Any]) -> int | None:
    for entry in read_entries(store, "exact"):
        width = entry["exact"].get("width")
        if entry["setting"] == setting and type(width) is int and width in EXACT_WIDTHS:
            return width
    return None


def _measure(target: Model, check: CheckCancelled) -> int:
    """The cheapest width at which drafts change no score."""
    with closing(target.open_session(check)) as session:
        rows_s = measure_rows(session, _MEASURE_S, check)
    return next(width for width in rank_widths(rows_s) if check_width(target, width, check))


def _describe(width: int) -> str:
    if width == 1:
        return "Every forward has 1 row for --exact, so nothing is drafted."
    return f"Every forward has {width} rows for --exact; the text depends on this number (--exact-width {width})."
