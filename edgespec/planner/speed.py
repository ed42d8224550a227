"""Estimate a model's speed before its download: measure a few blocks and scale to the whole model."""

from __future__ import annotations

import importlib.resources
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from edgespec.backends import device_memory, open_model
from edgespec.backends.devices import host_memory
from edgespec.backends.isolated import ChildDied, run_in_child
from edgespec.backends.llamacpp.shape import block_of, count_blocks, write_shape
from edgespec.backends.options import LoadOptions, idle_cores
from edgespec.controller.cost_model import Profile, choose_chain_length
from edgespec.controller.profiler import LOAD_CONTEXTS, measure_contexts, measure_rows
from edgespec.controller.store import ProfileKey, calibration_folder, read_entries, save_entry
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, BackendUnavailable, CacheError
from edgespec.formats.gguf import GGML_TYPES, Header, TensorInfo
from edgespec.formats.gguf_validate import read_file

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


# How fast this machine reads weights of each type, to estimate the speed of models that are not here.
#
# The time of a forward is nearly proportional to the bytes of the weights that it reads. The seconds of a byte, by type
# and number of rows, are measured once on a few blocks of a common shape, and stored. Types of the same size differ:
# on a CPU llama.cpp reads Q4_0 weights, which it repacks, faster than other types of four bits.


_VERSION = 2  # of the measured shape
_WIDTH, _FEED_FORWARD = 2048, 8192
_BYTES = 128 * 2**20  # of the measured blocks at least: more than the caches of most CPUs
_TYPE_PROFILE_S = 0.6  # for each type
_MEASURED_CONTEXT = 512
_ROUND_S = 4e-4  # of the loop in each round, outside of the forward
_TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
COMMON = frozenset({"Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "F16"})
_MEASURABLE = COMMON | {"Q2_K", "Q3_K", "Q5_0", "Q5_1", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4", "BF16"}
_TRAINED = frozenset({"MXFP4", "NVFP4", "F16", "BF16", "F32"})  # other types of these weights are less exact
_SAME_SIZE = 1.15  # the ratio of the bits of two types that are about as large
_MUCH_FASTER = 1.25


@dataclass(frozen=True, slots=True)
class FasterType:
    """Another type of about the same size, with which a forward of one row is `gain` times as fast."""

    name: str
    instead_of: str
    gain: float

    def __str__(self) -> str:
        return (
            f"{self.name} weights are {self.gain:.1f} times as fast as {self.instead_of} weights on this machine, at "
            f"about the same size; look for a {self.name} file"
        )


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Seconds of a byte that a forward reads, by type of the weights and by rows of the forward."""

    rates: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def estimate(self, target: Mapping[str, float], draft: Mapping[str, float] | None = None) -> SpeedEstimate | None:
        """Of models of which one row reads so many bytes of each type; None where the target's type is not measured."""
        rows = self._forward_s(target)
        drafted = self._forward_s(draft) if draft else {}
        return SpeedEstimate(rows, drafted.get(1)) if rows else None

    def find_faster(self, read: Mapping[str, float]) -> FasterType | None:
        """A type that would be much faster than that of most of the weights, at about the same size; None for none."""
        main = find_main_type(read)
        present = self._forward_s(read)
        if main is None or not present:
            return None
        found = None
        for name in find_similar(main) & self.rates.keys():
            as_large = read[main] * _bits(name) / _bits(main)
            others = {kind: n for kind, n in read.items() if kind != main}
            then = self._forward_s({**others, name: others.get(name, 0.0) + as_large})
            gain = present[1] / then[1] if then else 0.0
            if gain >= _MUCH_FASTER and (found is None or gain > found.gain):
                found = FasterType(name, main, gain)
        return found

    def compare_types(self) -> dict[str, float]:
        """Seconds of a weight in a forward of one row, over those of the fastest type, in ascending order."""
        seconds = {name: rate[1] * _bits(name) for name, rate in self.rates.items()}
        least = min(seconds.values(), default=1.0)
        return {name: seconds[name] / least for name in sorted(seconds, key=lambda each: seconds[each])}

    def _forward_s(self, read: Mapping[str, float]) -> dict[int, float]:
        """Seconds of a round by rows. Types that are not measured count as that of most of the weights."""
        main = find_main_type(read)
        if main is None or main not in self.rates:
            return {}
        parts = [(self.rates.get(kind, self.rates[main]), n) for kind, n in read.items()]
        known = set.intersection(*(set(rate) for rate, _ in parts))
        return {rows: _ROUND_S + sum(rate[rows] * n for rate, n in parts) for rows in sorted(known)}


def find_main_type(read: Mapping[str, float]) -> str | None:
    """The type of most of the bytes."""
    return max(read, key=lambda kind: read[kind], default=None)


def count_weights(read: Mapping[str, float]) -> float:
    """How many weights so many bytes of each type are."""
    return sum(8 * n / _bits(kind) for kind, n in read.items())


def find_similar(name: str) -> frozenset[str]:
    """The common types of about the size of a type; none of a type in which models are trained."""
    if name in _TRAINED:
        return frozenset()
    bits = _bits(name)
    return frozenset(each for each in COMMON - {name} if 1 / _SAME_SIZE <= _bits(each) / bits <= _SAME_SIZE)


def _bits(name: str) -> float:
    return 8 * _TYPES[name].block_bytes / _TYPES[name].block_items


def load_speed() -> MachineSpeed:
    """What is stored for this machine and runtime."""
    for entry in read_entries(_path(), "rates"):
        if entry["setting"] == _setting():
            try:
                return MachineSpeed({kind: _read_rate(rate) for kind, rate in entry["rates"].items()})
            except (TypeError, ValueError, AttributeError):
                break
    return MachineSpeed()


def save_speed(speed: MachineSpeed) -> None:
    """Store it for this machine and runtime."""
    rates = {kind: {str(rows): seconds for rows, seconds in rate.items()} for kind, rate in speed.rates.items()}
    save_entry(_path(), {"setting": _setting(), "rates": rates}, "rates")


def measure_speed(
    types: Iterable[str],
    report: Callable[[str], None] = lambda text: None,
    check: CheckCancelled = lambda: None,
    *,
    again: bool = False,
) -> MachineSpeed:
    """What is stored, and what of `types` is not, or all of them `again`: measured and stored. Raises Cancelled.

    Takes about a second for each type, in a child process, which may abort. Types are left out where llama.cpp or
    the memory does not allow the measurement. `report` is told in words what is being done.
    """
    stored = load_speed()
    missing = sorted(_MEASURABLE.intersection(types) - (set() if again else stored.rates.keys()))
    if not missing:
        return stored
    with tempfile.TemporaryDirectory(prefix="edgespec-") as name:
        folder, at = Path(name), missing[0]

        def tell() -> None:
            nonlocal at
            at = next((path.stem for path in folder.glob("*.gguf")), at)
            report(f"measuring this machine once: {at} weights ({missing.index(at) + 1} of {len(missing)}) …")

        tell()
        try:
            measured = run_in_child(_measure, missing, folder, check=check, on_poll=tell)
        except (ChildDied, BackendError, BackendUnavailable, CacheError):
            return stored
    speed = MachineSpeed({**stored.rates, **measured})
    save_speed(speed)
    return speed


def _measure(types: list[str], folder: Path) -> dict[str, dict[int, float]]:
    return {name: _measure_type(name, folder / f"{name}.gguf") for name in types}


def _measure_type(name: str, path: Path) -> dict[int, float]:
    """Seconds of a byte by rows.

    On CPUs they are those of the processor, which its threads share: other programs on the machine would otherwise
    decide which type is the fastest.
    """
    header = _make_header(name)
    blocks = header.own("block_count") or 1
    write_shape(header, blocks, path)
    threads = idle_cores()
    options = LoadOptions(context_size=_MEASURED_CONTEXT, mmap=False, threads=threads)
    clock = perf_counter if device_memory("llamacpp") else lambda: process_time() / threads
    model = open_model("llamacpp", path, options, progress=lambda fraction: None, check=lambda: None)
    try:
        session = model.open_session(lambda: None)
        try:
            n_bytes = sum(read_by_type(header, -1, blocks).values())
            rows = measure_rows(session, _TYPE_PROFILE_S, clock=clock)
            return {n: seconds / n_bytes for n, seconds in rows.items()}
        finally:
            session.close()
    finally:
        model.close()
        path.unlink()


def _make_header(type_name: str) -> Header:
    """A model of the shape, with the embedded model's vocabulary and matrices of the type."""
    asset = importlib.resources.files("edgespec") / "assets" / "python-6m" / "target.gguf"
    with importlib.resources.as_file(asset) as path:
        embedded = read_file(path)
    width, wide, narrow = _WIDTH, _FEED_FORWARD, _WIDTH // 4
    block = {"attn_q": (width, width), "attn_k": (width, narrow), "attn_v": (width, narrow),
             "attn_output": (width, width), "ffn_gate": (width, wide), "ffn_up": (width, wide),
             "ffn_down": (wide, width), "attn_norm": (width,), "ffn_norm": (width,)}  # fmt: skip
    blocks = math.ceil(_BYTES / sum(_TYPES[type_name].nbytes(math.prod(shape)) for shape in block.values()))
    sizes = {
        "embedding_length": width,
        "feed_forward_length": wide,
        "block_count": blocks,
        "attention.head_count": width // 64,
        "attention.head_count_kv": width // 256,
        "rope.dimension_count": 64,
        "attention.key_length": 64,
        "attention.value_length": 64,
    }
    vocab = next(tensor.shape[1] for tensor in embedded.tensors if tensor.name == "token_embd.weight")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, vocab), "output_norm.weight": (width,)}
    for i in range(blocks):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensor = TensorInfo(name, shape, _TYPES["F32" if len(shape) == 1 else type_name], offset)
        tensors.append(tensor)
        offset += math.ceil(tensor.nbytes / 32) * 32
    metadata = {**embedded.metadata, **{f"{embedded.architecture}.{key}": size for key, size in sizes.items()}}
    return replace(embedded, name="shape", metadata=metadata, tensors=tuple(tensors))


def _read_rate(rate: Mapping[str, Any]) -> dict[int, float]:
    """Raises ValueError without a time for one row."""
    read = {int(rows): float(seconds) for rows, seconds in rate.items()}
    if 1 not in read or min(read.values()) <= 0:
        raise ValueError("a rate needs one row, and times above zero")
    return read


def _path() -> Path:
    return calibration_folder() / "weights.json"


def _setting() -> dict[str, Any]:
    """As JSON reads it back."""
    key = ProfileKey.current("llamacpp", LoadOptions())
    return {"processor": key.processor, "runtime": key.runtime, "shape": _VERSION}
