"""Estimate the speed of a model that is not here, from how fast this machine reads weights of each type.

On a CPU the time of a forward is nearly proportional to the bytes that it reads; on an accelerator it also takes some
time for each block and for itself. The seconds per byte, by type of the weights and number of rows, and the seconds per
block and per forward are measured once on a few blocks of a common shape, and stored. Types of the same size differ: on
a CPU llama.cpp reads Q4_0 weights, which it repacks, faster than other types of four bits.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from edgespec.autopilot.profile import choose_chain_length, find_lowest
from edgespec.autopilot.profiler import measure_rows
from edgespec.autopilot.store import calibration_folder, current_setting, load_entry, save_entry
from edgespec.backends import device_memory, open_model
from edgespec.backends.llamacpp.rewrite import count_blocks
from edgespec.backends.llamacpp.shape import write_shape
from edgespec.backends.options import LoadOptions, idle_cores
from edgespec.errors import EdgespecError
from edgespec.formats.ggml_types import GGML_NAMES
from edgespec.formats.gguf import Header, TensorInfo
from edgespec.formats.gguf_validate import read_file
from edgespec.isolated import ChildDied, run_in_child
from edgespec.models.packaged import find_packaged
from edgespec.models.references import PackagedFile

ASSUMED = (0.5, 0.8)  # acceptance per draft token if the registry states none
_TOLERANCE = 0.2  # relative, of an estimated speed
_SHORT_S = 0.03  # in a shorter forward up to half of the time goes into starting operations and the like
_VERSION = 4  # of the measured shape
FORWARD, BLOCK = "forward", "block"  # stand beside the types of weights, and are counted as bytes are
_WIDTH, _FEED_FORWARD = 2048, 8192
_HEAD_SIZE = 64
_BYTES = 128 * 2**20  # of the measured blocks at least: more than the caches of most CPUs
_DEVICE_BYTES = 512 * 2**20  # on an accelerator, which reads 128 MiB faster than it starts their operations
_SLOW_BLOCK_S = 1e-3  # a device that takes longer for a narrow block is no faster than a processor
_FEW, _MANY, _NARROW = 2, 18, 256  # blocks, and their width, from which the time of a block is measured
_TYPE_PROFILE_S = 0.6  # for each type
_MEASURED_CONTEXT = 512
_LEAST = 0.05  # the share of a measured time that is left at least when other times are subtracted
_ROUND_S = 4e-4  # of the loop in each round, outside of the forward
COMMON = frozenset({"Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "F16"})
_MEASURABLE = GGML_NAMES.keys() - {"F32", "F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}
_TRAINED = frozenset({"MXFP4", "NVFP4", "F16", "BF16", "F32"})  # other types of these weights are less exact
_SAME_SIZE = 1.15  # the ratio of the bits of two types that are about as large
_MUCH_FASTER = 1.25
_LONG_BLOCK = 256  # elements of a row, of the K types
_MOST = 0.9  # the share of the weights that a type must be able to hold to be recommended


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Seconds of a target forward by rows, and of a draft token; None without a draft model."""

    rows: dict[int, float]
    draft_s: float | None

    @property
    def plain(self) -> tuple[float, float]:
        """Tokens/s of plain decoding: lower and upper bound."""
        speed = 1 / self.rows[1]
        slower = 0.5 if self.rows[1] < _SHORT_S else _TOLERANCE
        return speed * (1 - slower), speed * (1 + _TOLERANCE)

    def speculative(self, acceptance: float) -> tuple[int, float]:
        """(length, speedup over plain decoding) of the best chain at this acceptance per token.

        A gain below half a percent counts as none.
        """
        depth, speedup = choose_chain_length(self.rows, self.draft_s or 0.0, acceptance)
        return (depth, speedup) if round(speedup, 2) > 1 else (0, 1.0)

    def with_network(self, wait_s: float) -> SpeedEstimate:
        """The same if each forward of the target waits for a network."""
        return replace(self, rows={n: seconds + wait_s for n, seconds in self.rows.items()})

    @property
    def pays_from(self) -> float | None:
        """The lowest acceptance, in steps of 5%, at which a chain beats plain decoding; None if 100% does not."""
        return find_lowest(lambda rate: self.speculative(rate)[1] > 1.0)


def read_by_type(header: Header) -> dict[str, float]:
    """Bytes of weights that a forward of one row reads, by type: only the routed experts, and no embedding table.

    FORWARD and BLOCK count the forward and its blocks.
    """
    chosen = (header.own("expert_used_count") or 1) / (header.own("expert_count") or 1)
    untied = any(tensor.name == "output.weight" for tensor in header.tensors)
    blocks = count_blocks(header) or 1
    read: defaultdict[str, float] = defaultdict(float)
    for tensor in header.tensors:
        if tensor.block < blocks and not (untied and tensor.name == "token_embd.weight"):
            read[tensor.type.name] += tensor.nbytes * (chosen if "_exps." in tensor.name else 1)
    return {**read, FORWARD: 1.0, BLOCK: float(blocks)}


def share_of_long_blocks(header: Header) -> float:
    """The share of the weights that a forward reads whose rows are made of whole blocks of 256.

    llama.cpp keeps the others in larger types where a file is of one of the K types.
    """
    read = [each for each in header.tensors if len(each.shape) > 1]
    longer = sum(each.nbytes for each in read if each.shape[0] % _LONG_BLOCK == 0)
    return longer / max(1, sum(each.nbytes for each in read))


@dataclass(frozen=True, slots=True)
class FasterType:
    """Another type of about the same size, with which a forward of one row is `gain` times as fast."""

    name: str
    instead_of: str
    gain: float

    def __str__(self) -> str:
        return (
            f"{self.name} weights are {self.gain:.1f} times as fast as {self.instead_of} weights on this machine, at "
            "about the same size"
        )


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Seconds per byte that a forward reads, by type of the weights and by rows of the forward."""

    rates: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def estimate(self, target: Mapping[str, float], draft: Mapping[str, float] | None = None) -> SpeedEstimate | None:
        """Estimate a target, and a draft model, from the bytes of each type that a forward of one row reads. None if
        the type of most of the target's bytes was not measured.
        """
        rows = self._forward_s(target)
        drafted = self._forward_s(draft) if draft else {}
        return SpeedEstimate(rows, drafted.get(1)) if rows else None

    def find_faster(self, read: Mapping[str, float], long_blocks: float = 1.0) -> FasterType | None:
        """A type that would be much faster than that of most of the weights, at about the same size; None for none.

        `long_blocks`: the share of the weights that types with blocks of 256 can hold.
        """
        main, present = find_main_type(read), self._forward_s(read)
        if main is None or not present:
            return None
        found = None
        for name in find_similar(read) & self.rates.keys():
            if GGML_NAMES[name].block_items == _LONG_BLOCK and long_blocks < _MOST:
                continue
            as_large = read[main] * GGML_NAMES[name].bits / GGML_NAMES[main].bits
            others = {kind: n for kind, n in read.items() if kind != main}
            then = self._forward_s({**others, name: others.get(name, 0.0) + as_large})
            gain = present[1] / then[1]
            if gain >= _MUCH_FASTER and (found is None or gain > found.gain):
                found = FasterType(name, main, gain)
        return found

    def compare_types(self) -> dict[str, float]:
        """Seconds per weight in a forward of one row, as multiples of the fastest type's, in ascending order."""
        seconds = {name: rate[1] * GGML_NAMES[name].bits for name, rate in self.rates.items() if name in GGML_NAMES}
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
    return max(read, key=lambda kind: read[kind], default=None)


def count_weights(read: Mapping[str, float]) -> float:
    """How many weights so many bytes of each type are."""
    return sum(8 * n / GGML_NAMES[kind].bits for kind, n in read.items() if kind in GGML_NAMES)


def find_similar(read: Mapping[str, float]) -> frozenset[str]:
    """The common types of about the size of the main type; none for a type in which models are trained."""
    main = find_main_type(read)
    if main is None or main in _TRAINED:
        return frozenset()
    bits = GGML_NAMES[main].bits
    return frozenset(each for each in COMMON - {main} if 1 / _SAME_SIZE <= GGML_NAMES[each].bits / bits <= _SAME_SIZE)


def load_speed(options: LoadOptions = LoadOptions()) -> MachineSpeed:  # noqa: B008 - frozen
    """The rates that are stored for this machine and runtime, and for the threads and devices of `options`."""
    return load_entry(_path(), "rates", _setting(options), read_rates) or MachineSpeed()


def save_speed(speed: MachineSpeed, options: LoadOptions = LoadOptions()) -> None:  # noqa: B008 - frozen
    save_entry(_path(), {"setting": _setting(options), "rates": speed.rates}, "rates")


def measure_speed(
    types: Iterable[str],
    report: Callable[[str], None] = lambda text: None,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    *,
    again: bool = False,
) -> MachineSpeed:
    """Return the stored rates. Those of `types` that are not stored are measured first, or with `again` all of `types`,
    and then stored. Raises Cancelled.

    Takes about a second for each type, in a child process, which may abort. Types are left out if llama.cpp or
    the memory does not allow the measurement. `report` is called with words for what is being done.
    """
    stored = load_speed(options)
    missing = sorted(_MEASURABLE.intersection(types) - (set() if again else stored.rates.keys()))
    if not missing:
        return stored
    report(f"measuring this machine once, with weights of {len(missing)} types: {', '.join(missing)} …")
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
        speed = add_rates(stored, _measure, missing, Path(folder), options)
    if speed is not stored:
        save_speed(speed, options)
    return speed


def add_rates(stored: MachineSpeed, measure: Callable[..., dict[str, dict[int, float]]], *args: Any) -> MachineSpeed:
    """`stored` with what `measure` finds for `args` in a child process, which may abort: then `stored` itself.

    Raises Cancelled.
    """
    try:
        return MachineSpeed({**stored.rates, **run_in_child(measure, *args)})
    except (ChildDied, EdgespecError):
        return stored


def _measure(types: list[str], folder: Path, options: LoadOptions) -> dict[str, dict[int, float]]:
    """Rates of those types that gguf can write, llama.cpp can open and the memory holds. On an accelerator, rates of
    BLOCK and FORWARD too.
    """
    rates: dict[str, dict[int, float]] = {}
    if device_memory("llamacpp"):
        few, many = (
            _time_shape(_make_header("Q8_0", _NARROW, n), folder / "block.gguf", options) for n in (_FEW, _MANY)
        )
        shared = few.keys() & many.keys()
        rates[BLOCK] = {n: max(many[n] - few[n], few[n] * _LEAST) / (_MANY - _FEW) for n in shared}
        rates[FORWARD] = {n: max(few[n] - _FEW * rates[BLOCK][n], few[n] * _LEAST) for n in shared}
    for name in types:
        with suppress(EdgespecError, ValueError):  # ValueError: gguf does not know the type
            rates[name] = _measure_type(name, folder / f"{name}.gguf", options, rates)
    return rates


def _measure_type(
    name: str, path: Path, options: LoadOptions, rates: Mapping[str, Mapping[int, float]]
) -> dict[int, float]:
    """Seconds per byte by rows, without the times of blocks and forwards that `rates` has."""
    is_fast = BLOCK in rates and rates[BLOCK][1] < _SLOW_BLOCK_S
    header = _make_header(name, least=_DEVICE_BYTES if is_fast else _BYTES)
    seconds = _time_shape(header, path, options)
    read = read_by_type(header)
    n_bytes = sum(n for kind, n in read.items() if kind in GGML_NAMES)
    for kind in (BLOCK, FORWARD):
        if kind in rates:
            seconds = {
                n: max(s - read[kind] * rates[kind][n], s * _LEAST) for n, s in seconds.items() if n in rates[kind]
            }
    return {n: each / n_bytes for n, each in seconds.items()}


def _time_shape(header: Header, path: Path, options: LoadOptions) -> dict[int, float]:
    """Seconds of a forward by rows.

    On CPUs they are those of the processor, which its threads share: other programs on the machine would otherwise
    decide which type is the fastest.
    """
    write_shape(header, count_blocks(header), path)
    threads = options.threads or idle_cores()
    small = LoadOptions(
        context_size=_MEASURED_CONTEXT,
        mmap=False,
        threads=threads,
        gpu_layers=_layers(options),
        device=options.device,
    )
    clock = perf_counter if device_memory("llamacpp") else lambda: process_time() / threads
    with (
        closing(open_model("llamacpp", path, small)) as model,
        closing(model.open_session()) as session,
    ):
        rows = measure_rows(session, _TYPE_PROFILE_S, clock=clock)
    path.unlink()
    return rows


def _make_header(
    type_name: str, width: int | None = None, blocks: int | None = None, least: int | None = None
) -> Header:
    """A model of the shape, with the embedded model's vocabulary.

    It has `blocks`, or as many as have at least `least` bytes of matrices of the type.
    """
    asset = find_packaged(PackagedFile("python-6m/target.gguf"))
    assert asset is not None
    embedded = read_file(asset)
    width = width or _WIDTH
    wide, narrow = width * _FEED_FORWARD // _WIDTH, width // 4
    block = {"attn_q": (width, width), "attn_k": (width, narrow), "attn_v": (width, narrow),
             "attn_output": (width, width), "ffn_gate": (width, wide), "ffn_up": (width, wide),
             "ffn_down": (wide, width), "attn_norm": (width,), "ffn_norm": (width,)}  # fmt: skip
    blocks = blocks or math.ceil(
        (least or _BYTES) / sum(GGML_NAMES[type_name].nbytes(math.prod(shape)) for shape in block.values())
    )
    heads = width // _HEAD_SIZE
    sizes = {
        "embedding_length": width, "feed_forward_length": wide, "block_count": blocks, "attention.head_count": heads,
        "attention.head_count_kv": heads // 4, "rope.dimension_count": _HEAD_SIZE,
        "attention.key_length": _HEAD_SIZE, "attention.value_length": _HEAD_SIZE,
    }  # fmt: skip
    vocab = next(tensor.shape[1] for tensor in embedded.tensors if tensor.name == "token_embd.weight")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, vocab), "output_norm.weight": (width,)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(blocks) for name, shape in block.items()}
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensor = TensorInfo(name, shape, GGML_NAMES["F32" if len(shape) == 1 else type_name], offset)
        tensors.append(tensor)
        offset += math.ceil(tensor.nbytes / 32) * 32
    metadata = {**embedded.metadata, **{f"{embedded.architecture}.{key}": size for key, size in sizes.items()}}
    return replace(embedded, name="shape", metadata=metadata, tensors=tuple(tensors))


def read_rates(stored: Mapping[str, Mapping[str, float]]) -> MachineSpeed:
    """The rates of an entry that was stored as JSON. Raises ValueError for a type without a time for one row, or with a
    time that is not above zero.
    """
    rates = {kind: {int(n): float(seconds) for n, seconds in rate.items()} for kind, rate in stored.items()}
    if not all(1 in rate and min(rate.values()) > 0 for rate in rates.values()):
        raise ValueError("a rate needs one row, and times above zero")
    return MachineSpeed(rates)


def _path() -> Path:
    return calibration_folder() / "weights.json"


def _layers(options: LoadOptions) -> int | None:
    """0 if the processor computes all layers, else None: what is measured is all in one place."""
    return 0 if options.gpu_layers == 0 else None


def _setting(options: LoadOptions) -> dict[str, Any]:
    """Returns the key of an entry as JSON reads it back."""
    setting = current_setting("llamacpp", options)
    devices = None if options.device is None else list(options.device)
    stated = {"threads": options.threads, "gpu_layers": _layers(options), "devices": devices}
    return {"processor": setting["processor"], "runtime": setting["runtime"], "shape": _VERSION, **stated}
