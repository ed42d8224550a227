"""How fast a model would be on this machine, before it is here: a few blocks are measured, the rest is scaled."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.control.costs import Profile
from edgespec.control.profile import measure
from edgespec.core.protocols import CheckCancelled
from edgespec.registry.fit import host_memory
from edgespec.registry.gguf import Header

ACCEPTANCES = (0.5, 0.8)  # of a drafted token, from a paired draft model: what is assumed where nothing is known
_TOLERANCE = 0.2  # of a speed that is put together from a few blocks
_FEW, _MORE = 1, 3  # blocks that are measured
_MEASURED_S = 3.0
_CONTEXT = 256
_MOST_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect. Seconds of a target forward by rows, and of a drafted token; None without a draft model."""

    rows: dict[int, float]
    draft_s: float | None

    @property
    def plain(self) -> tuple[float, float]:
        """Tokens a second, at least and at most."""
        speed = 1 / self.rows[1]
        return speed * (1 - _TOLERANCE), speed * (1 + _TOLERANCE)

    def speculative(self, acceptance: float) -> tuple[int, float]:
        """The best chain where each drafted token is right with `acceptance`: (length, times plain decoding)."""
        best, expected, reached = (0, 1.0), 1.0, 1.0
        for depth in range(1, _MOST_DEPTH + 1):
            reached *= acceptance
            expected += reached
            if depth + 1 in self.rows:
                cost = self.rows[depth + 1] + depth * (self.draft_s or 0.0)
                best = max(best, (depth, expected * self.rows[1] / cost), key=lambda each: each[1])
        return best

    @property
    def pays_from(self) -> float | None:
        """The acceptance from which some chain is faster than plain decoding; None where even certainty is not."""
        return next((a / 100 for a in range(5, 101, 5) if self.speculative(a / 100)[1] > 1.0), None)


def forecast(
    target: Header, draft: Header | None, options: LoadOptions, check: CheckCancelled = lambda: None
) -> Forecast | None:
    """Measure blocks of the same shape and quantization; None where there is no memory for even that.

    Raises CacheError, BackendError, Cancelled.
    """
    rows = _scaled(target, options, check)
    drafted = _scaled(draft, options, check) if draft is not None else None
    if rows is None or (draft is not None and drafted is None):
        return None
    return Forecast(rows, drafted[1] if drafted is not None else None)


def _scaled(header: Header, options: LoadOptions, check: CheckCancelled) -> dict[int, float] | None:
    """Seconds of a forward by rows of the whole model."""
    blocks = header.own("block_count") or 1
    few, more = min(_FEW, blocks), min(_MORE, blocks)
    needed = header.weight_bytes * (more + 1) / (blocks + 1)  # embedding and output count as about one block
    if needed > host_memory().usable:
        return None
    profiles = [_measured(header, n, options, check) for n in sorted({few, more})]
    if len(profiles) == 1:
        return dict(profiles[0].rows)
    of_few, of_more = (profile.rows for profile in profiles)
    scale = (blocks - more) / (more - few)
    both = sorted(of_few.keys() & of_more.keys())
    return {n: of_more[n] + scale * max(0.0, of_more[n] - of_few[n]) for n in both}


def _measured(header: Header, blocks: int, options: LoadOptions, check: CheckCancelled) -> Profile:
    from edgespec.backends.llamacpp.shape import write_shape

    small = LoadOptions(
        context_size=_CONTEXT,
        threads=options.threads,
        gpu_layers=options.gpu_layers,
        kv_type=options.kv_type,
        flash_attention=options.flash_attention,
        mmap=False,
        exact=options.exact,
    )
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
        path = Path(folder) / "shape.gguf"
        write_shape(header, blocks, path)
        model = open_model("llamacpp", path, small, progress=lambda fraction: None, check=check)
        try:
            session = model.open_session(check)
            try:
                return measure(session, None, _MEASURED_S, check)
            finally:
                session.close()
        finally:
            model.close()
