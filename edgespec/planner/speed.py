"""Estimate a model's speed before its download: measure a few blocks and scale to the whole model."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgespec.backends import open_model
from edgespec.backends.devices import host_memory
from edgespec.backends.isolated import ChildDied, run_in_child
from edgespec.backends.llamacpp.shape import block_of, count_blocks, write_shape
from edgespec.backends.options import LoadOptions
from edgespec.controller.cost_model import Profile, choose_chain_length
from edgespec.controller.profiler import LOAD_CONTEXTS, measure_contexts, measure_rows
from edgespec.core.protocols import CheckCancelled
from edgespec.formats.gguf import Header

ASSUMED = (0.5, 0.8)  # acceptance per draft token if the registry states none
_TOLERANCE = 0.2  # relative, of a speed that is scaled from a few blocks
_PROFILE_S = 3.0
_CONTEXT = 2048  # of the measured blocks
_LONG_ROWS = (1, 4, 16)  # that are stated after longer contexts
_SAMPLE_BYTES = 2**29  # of the measured blocks; more bytes give less noise


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Seconds of a target forward by rows, and of a draft token; None without a draft model.

    longer  those of forwards after more tokens, by their number
    """

    rows: dict[int, float]
    draft_s: float | None
    longer: dict[int, dict[int, float]] = field(default_factory=dict)

    @property
    def plain(self) -> tuple[float, float]:
        """Tokens/s of plain decoding: lower and upper bound."""
        speed = 1 / self.rows[1]
        return speed * (1 - _TOLERANCE), speed * (1 + _TOLERANCE)

    def speculative(self, acceptance: float) -> tuple[int, float]:
        """(length, speedup over plain decoding) of the best chain at this acceptance per token."""
        return choose_chain_length(self.rows, self.draft_s or 0.0, acceptance)

    def with_network(self, wait_s: float) -> SpeedEstimate:
        """The same where each forward of the target waits for a network."""

        def add(rows: dict[int, float]) -> dict[int, float]:
            return {n: seconds + wait_s for n, seconds in rows.items()}

        return SpeedEstimate(add(self.rows), self.draft_s, {n: add(rows) for n, rows in self.longer.items()})

    def by_context(self, contexts: Sequence[int]) -> dict[int, dict[int, float]]:
        """Seconds of a forward by rows after no and after each of `contexts` tokens; see `Profile`."""
        profile = Profile(self.rows, longer={n: Profile(rows) for n, rows in self.longer.items()})
        known = _LONG_ROWS if self.longer else ()
        return {0: self.rows, **{n: {m: profile.seconds(m, n) for m in known} for n in contexts if known}}

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
    draft_s = drafted.rows[1] if drafted is not None else None
    return SpeedEstimate(dict(rows.rows), draft_s, _rows_by_context(rows))


def _scale(header: Header, options: LoadOptions, folder: Path) -> Profile | None:
    """Seconds of forwards of the whole model: the weights' by the bytes that they read, attention's by the blocks.

    The difference of two noisy measurements is bounded: a block's byte takes at most the time it would if the
    embedding and output took none, and at least half of the mean over all bytes. No forward is faster than one row.
    """
    blocks = count_blocks(header) or 1
    first, period = find_pattern(header)
    periods = 1 + max(1, _SAMPLE_BYTES // max(1, _bytes(header, first, first + period)))
    few, more = min(first + period, blocks), min(first + periods * period, blocks)
    if _bytes(header, -1, more) > host_memory().usable:
        return None
    measured = _measure_blocks(header, few, options, folder)
    if more == few:
        return measured
    of_few, measured = measured.rows, _measure_blocks(header, more, options, folder)
    of_more = measured.rows
    read = read_bytes(header, 0, more)
    share = read / (read + read_bytes(header, -1, 0))
    whole = {}
    for n in sorted(of_few.keys() & of_more.keys()):
        max_byte_s = of_more[n] / read
        byte_s = (of_more[n] - of_few[n]) / read_bytes(header, few, more)
        byte_s = min(max(byte_s, max_byte_s * share / 2), max_byte_s)
        whole[n] = of_more[n] + byte_s * read_bytes(header, more, blocks)
    rows = {n: max(seconds, whole[1]) for n, seconds in whole.items()}
    longer = {}
    for context, by_rows in _rows_by_context(measured).items():
        attention = {n: (seconds - of_more[n]) * blocks / more for n, seconds in by_rows.items() if n in of_more}
        longer[context] = Profile({n: rows[n] + max(0.0, more_s) for n, more_s in attention.items() if n in rows})
    return Profile(rows, longer=longer)


def _bytes(header: Header, first: int, end: int) -> int:
    """Bytes of the weights of blocks `first` to `end - 1`; block -1 holds the embedding and output."""
    return sum(tensor.nbytes for tensor in header.tensors if first <= block_of(tensor) < end)


def read_bytes(header: Header, first: int, end: int) -> float:
    """The part of `_bytes` that a forward of one row reads: only the routed experts, and no embedding table."""
    return sum(read_by_type(header, first, end).values())


def read_by_type(header: Header, first: int, end: int) -> dict[str, float]:
    """`read_bytes` by type of the weights."""
    chosen = (header.own("expert_used_count") or 1) / (header.own("expert_count") or 1)
    untied = any(tensor.name == "output.weight" for tensor in header.tensors)
    read: defaultdict[str, float] = defaultdict(float)
    for tensor in header.tensors:
        if first <= block_of(tensor) < end and not (untied and tensor.name == "token_embd.weight"):
            read[tensor.type.name] += tensor.nbytes * (chosen if "_exps." in tensor.name else 1)
    return dict(read)


def find_pattern(header: Header) -> tuple[int, int]:
    """(first, period): from block `first` on, every `period`-th block has tensors of the same names and shapes."""
    blocks = count_blocks(header) or 1
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


def _rows_by_context(profile: Profile) -> dict[int, dict[int, float]]:
    return {context: dict(each.rows) for context, each in profile.longer.items()}


def _measure_blocks(header: Header, blocks: int, options: LoadOptions, folder: Path) -> Profile:
    small = replace(options.alone, context_size=_CONTEXT, mmap=False)
    path = folder / "shape.gguf"
    write_shape(header, blocks, path)
    model = open_model("llamacpp", path, small, progress=lambda fraction: None, check=lambda: None)
    try:
        session = model.open_session(lambda: None)
        try:
            rows = measure_rows(session, _PROFILE_S)
            return measure_contexts(session, Profile(rows), LOAD_CONTEXTS, _PROFILE_S, {})
        finally:
            session.close()
    finally:
        model.close()
