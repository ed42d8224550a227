"""Estimate a model's speed before its download: measure a few blocks and scale to the whole model."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.backends import open_model
from edgespec.backends.devices import host_memory
from edgespec.backends.isolated import ChildDied, run_in_child
from edgespec.backends.llamacpp.shape import block_of, write_shape
from edgespec.backends.options import LoadOptions
from edgespec.controller.cost_model import choose_chain_length
from edgespec.controller.profiler import measure_rows
from edgespec.core.protocols import CheckCancelled
from edgespec.formats.gguf import Header

_TOLERANCE = 0.2  # relative, of a speed that is scaled from a few blocks
_PROFILE_S = 3.0
_CONTEXT = 256
_SAMPLE_BYTES = 2**29  # of the measured blocks; more bytes give less noise


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Seconds of a target forward by rows, and of a draft token; None without a draft model."""

    rows: dict[int, float]
    draft_s: float | None

    @property
    def plain(self) -> tuple[float, float]:
        """Tokens/s of plain decoding: lower and upper bound."""
        speed = 1 / self.rows[1]
        return speed * (1 - _TOLERANCE), speed * (1 + _TOLERANCE)

    def speculative(self, acceptance: float) -> tuple[int, float]:
        """(length, speedup over plain decoding) of the best chain at this acceptance per token."""
        return choose_chain_length(self.rows, self.draft_s or 0.0, acceptance)

    @property
    def pays_from(self) -> float | None:
        """The lowest acceptance, in steps of 5%, at which a chain beats plain decoding; None if 100% does not."""
        return next((a / 100 for a in range(5, 101, 5) if self.speculative(a / 100)[1] > 1.0), None)


def estimate_speed(
    target: Header, draft: Header | None, options: LoadOptions, check: CheckCancelled = lambda: None
) -> SpeedEstimate | None:
    """Measure blocks of the same shape and quantization; None if they do not fit in memory or llama.cpp rejects them.

    Runs in a child process, since llama.cpp aborts on models that it does not expect. Raises CacheError, BackendError,
    InvalidModelFile, Cancelled.
    """
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:  # owned by the parent, since the child may abort
        try:
            return run_in_child(_estimate, target, draft, options, Path(folder), check=check)
        except ChildDied:
            return None


def _estimate(target: Header, draft: Header | None, options: LoadOptions, folder: Path) -> SpeedEstimate | None:
    rows = _scale(target, options, folder)
    drafted = _scale(draft, options, folder) if draft is not None else None
    if rows is None or (draft is not None and drafted is None):
        return None
    return SpeedEstimate(rows, drafted[1] if drafted is not None else None)


def _scale(header: Header, options: LoadOptions, folder: Path) -> dict[int, float] | None:
    """Seconds of a forward of the whole model by rows, scaled by the bytes that a forward reads.

    The difference of two noisy measurements is bounded: a block's byte takes at most the time it would if the
    embedding and output took none, and at least half of the mean over all bytes. No forward is faster than one row.
    """
    blocks = header.own("block_count") or 1
    first, period = find_pattern(header)
    periods = 1 + max(1, _SAMPLE_BYTES // max(1, _bytes(header, first, first + period)))
    few, more = min(first + period, blocks), min(first + periods * period, blocks)
    if _bytes(header, -1, more) > host_memory().usable:
        return None
    of_few = _measure_blocks(header, few, options, folder)
    if more == few:
        return of_few
    of_more = _measure_blocks(header, more, options, folder)
    read = _read_bytes(header, 0, more)
    share = read / (read + _read_bytes(header, -1, 0))
    whole = {}
    for n in sorted(of_few.keys() & of_more.keys()):
        max_byte_s = of_more[n] / read
        byte_s = (of_more[n] - of_few[n]) / _read_bytes(header, few, more)
        byte_s = min(max(byte_s, max_byte_s * share / 2), max_byte_s)
        whole[n] = of_more[n] + byte_s * _read_bytes(header, more, blocks)
    return {n: max(seconds, whole[1]) for n, seconds in whole.items()}


def _bytes(header: Header, first: int, end: int) -> int:
    """Bytes of the weights of blocks `first` to `end - 1`; block -1 holds the embedding and output."""
    return sum(tensor.nbytes for tensor in header.tensors if first <= block_of(tensor) < end)


def _read_bytes(header: Header, first: int, end: int) -> float:
    """The part of `_bytes` that a forward of one row reads: only the routed experts, and no embedding table."""
    chosen = (header.own("expert_used_count") or 1) / (header.own("expert_count") or 1)
    untied = any(tensor.name == "output.weight" for tensor in header.tensors)
    return sum(
        tensor.nbytes * (chosen if "_exps." in tensor.name else 1)
        for tensor in header.tensors
        if first <= block_of(tensor) < end and not (untied and tensor.name == "token_embd.weight")
    )


def find_pattern(header: Header) -> tuple[int, int]:
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


def _measure_blocks(header: Header, blocks: int, options: LoadOptions, folder: Path) -> dict[int, float]:
    """Seconds of a forward by rows."""
    small = replace(options, context_size=_CONTEXT, mmap=False)
    path = folder / "shape.gguf"
    write_shape(header, blocks, path)
    model = open_model("llamacpp", path, small, progress=lambda fraction: None, check=lambda: None)
    try:
        session = model.open_session(lambda: None)
        try:
            return measure_rows(session, _PROFILE_S)
        finally:
            session.close()
    finally:
        model.close()
