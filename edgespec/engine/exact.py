"""Forwards of one width, with which --exact keeps its promise on every device."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from edgespec.autopilot.profiler import measure_rows
from edgespec.autopilot.store import calibration_folder, current_setting, load_entry, save_entry
from edgespec.backends import Model
from edgespec.backends.fixed_width import FixedWidthModel, check_width, rank_widths
from edgespec.backends.options import EXACT_WIDTHS
from edgespec.errors import InvalidRequest
from edgespec.formats.fingerprint import fingerprint_weights
from edgespec.models.plan import Plan
from edgespec.progress import notice

_MEASURE_S = 1.0
_MIN_CONTEXT = 8  # tokens of a text, beside the rows of a forward


def keep_exact(target: Model, path: Path, planned: Plan) -> tuple[Model, Plan]:
    """`target` as --exact asks for it, and `planned`, the user's, with the width of its forwards in the options.

    The width is the user's, else the stored one, else the cheapest by measurement, which is stored for later loads.
    Raises InvalidRequest for a width at which drafts would change the text, BackendError, CacheError, Cancelled.
    """
    options = planned.options
    if options.exact and not target.is_row_invariant:
        # The key has the user's threads, not the idle cores: these differ from day to day, and the text must not.
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
