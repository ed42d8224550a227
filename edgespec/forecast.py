"""How fast a model would be on this machine, before it is here: a few blocks are measured, the rest is scaled."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context, resource_tracker
from pathlib import Path

from edgespec.backends import open_model
from edgespec.backends.llamacpp.shape import block_of, write_shape
from edgespec.backends.options import LoadOptions
from edgespec.control.costs import Profile
from edgespec.control.profile import measure
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled
from edgespec.registry.fit import host_memory
from edgespec.registry.gguf import Header

ACCEPTANCES = (0.5, 0.8)  # of a drafted token, from a paired draft model: what is assumed where nothing is known
_TOLERANCE = 0.2  # of a speed that is put together from a few blocks
_POLL_S = 0.1
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
    """Measure blocks of the same shape and quantization; None where there is no memory for even that, or where the
    runtime does not take a part of this model.

    In a process of its own, since llama.cpp ends its process where a model is not as it expects. Raises CacheError,
    BackendError, InvalidModelFile, Cancelled.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, _interrupts_kept_out():
        work = pool.submit(_forecast, target, draft, options)
        while not work.done():
            wait([work], timeout=_POLL_S)
            try:
                check()
            except Cancelled:
                for process in active_children():
                    process.terminate()
                raise
        try:
            return work.result()
        except BrokenProcessPool:
            return None


@contextmanager
def _interrupts_kept_out() -> Iterator[None]:
    """Ctrl-C is this process's alone: one that is started meanwhile inherits what is blocked."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # a process needs it, and its start would unblock
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forecast(target: Header, draft: Header | None, options: LoadOptions) -> Forecast | None:
    rows = _scaled(target, options)
    drafted = _scaled(draft, options) if draft is not None else None
    if rows is None or (draft is not None and drafted is None):
        return None
    return Forecast(rows, drafted[1] if drafted is not None else None)


def _scaled(header: Header, options: LoadOptions) -> dict[int, float] | None:
    """Seconds of a forward by rows of the whole model."""
    blocks = header.own("block_count") or 1
    first, period = pattern(header)
    few, more = min(first + period, blocks), min(first + 2 * period, blocks)
    needed = header.weight_bytes * (more + 1) / (blocks + 1)  # embedding and output count as about one block
    if needed > host_memory().usable:
        return None
    of_few = _measured(header, few, options).rows
    if more == few:
        return dict(of_few)
    of_more = _measured(header, more, options).rows
    scale = (blocks - more) / (more - few)
    both = sorted(of_few.keys() & of_more.keys())
    return {n: of_more[n] + scale * max(0.0, of_more[n] - of_few[n]) for n in both}


def pattern(header: Header) -> tuple[int, int]:
    """(first, period): from block `first` on, every `period`-th block has tensors of the same names and shapes."""
    blocks = header.own("block_count") or 1
    shapes: list[set[tuple[str, tuple[int, ...]]]] = [set() for _ in range(blocks)]
    for tensor in header.tensors:
        block = block_of(tensor)
        if 0 <= block < blocks:
            shapes[block].add((tensor.name.split(".", 2)[2], tensor.shape))
    for first in range(blocks):
        for period in range(1, (blocks - first) // 2 + 1):
            if all(shapes[i] == shapes[i + period] for i in range(first, blocks - period)):
                return first, period
    return 0, blocks


def _measured(header: Header, blocks: int, options: LoadOptions) -> Profile:
    small = replace(options, context_size=_CONTEXT, mmap=False)
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
        path = Path(folder) / "shape.gguf"
        write_shape(header, blocks, path)
        model = open_model("llamacpp", path, small, progress=lambda fraction: None, check=lambda: None)
        try:
            session = model.open_session(lambda: None)
            try:
                return measure(session, None, _MEASURED_S)
            finally:
                session.close()
        finally:
            model.close()
