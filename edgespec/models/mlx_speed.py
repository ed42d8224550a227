"""Estimate the speed of an MLX model that is not here, from how fast this machine reads weights of its kind.

As in models.speed, seconds per byte by rows of a forward are measured once for each kind of weights on a few blocks of
a common shape, and stored. Kinds are the bits of a weight; modes and group sizes are not told apart.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from edgespec.autopilot.profiler import measure_rows
from edgespec.autopilot.store import calibration_folder, current_setting, load_entry, save_entry
from edgespec.backends.options import LoadOptions
from edgespec.formats.mlx_folder import Folder
from edgespec.models.packaged import find_packaged
from edgespec.models.references import PackagedFile
from edgespec.models.speed import MachineSpeed, add_rates, read_rates

KINDS = {"2-bit": 2, "3-bit": 3, "4-bit": 4, "5-bit": 5, "6-bit": 6, "8-bit": 8, "16-bit": None}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of their number in a config
_GGUF_KINDS = {"Q4_0": "4-bit", "Q4_1": "4-bit", "Q8_0": "8-bit", "F16": "16-bit"}
_WIDTH, _FEED_FORWARD = 2048, 8192
_BLOCK_WEIGHTS = 2 * _WIDTH**2 + 2 * _WIDTH * _WIDTH // 4 + 3 * _WIDTH * _FEED_FORWARD
_BYTES = 128 * 2**20  # of the measured blocks at least: more than the caches of most processors
_PROFILE_S = 0.6  # for each kind
_VERSION = 1  # of the measured shape


def read_folder_by_kind(folder: Folder) -> dict[str, float]:
    """Bytes of weights that a forward of one row reads, under their kind: only the routed experts, and no embedding
    table beside an output matrix. Empty for a kind that is not measured.
    """
    kind = _find_kind(folder)
    if kind is None:
        return {}
    weight_bytes = _weight_bits(KINDS[kind]) / 8
    width, words = folder.integer("hidden_size") or 0, folder.integer("vocab_size") or 0
    read = float(folder.weight_bytes)
    is_gemma = str(folder.config.get("model_type")).startswith("gemma")  # tied unless the config says otherwise
    if not folder.text_config.get("tie_word_embeddings", is_gemma):
        read -= width * words * weight_bytes
    if experts := next(filter(None, map(folder.integer, EXPERTS)), None):
        inner = folder.integer("moe_intermediate_size") or folder.integer("intermediate_size") or 0
        layers = (folder.integer("num_hidden_layers") or 0) - (folder.integer("first_k_dense_replace") or 0)
        all_bytes = layers * experts * 3 * width * inner * weight_bytes
        read -= all_bytes * (1 - (folder.integer("num_experts_per_tok") or experts) / experts)
    return {kind: read} if read > 0 else {}


def to_kinds(read: Mapping[str, float]) -> dict[str, float]:
    """The bytes of a GGUF file that MLX opens, under their kinds."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, n in read.items():
        if (kind := _GGUF_KINDS.get(name, name)) in KINDS:
            found[kind] += n
    return dict(found)


def guess_kind(name: str) -> tuple[str, float]:
    """(kind, bits of a weight) of a folder that is not here, by its name: four bits if that says nothing."""
    found = re.search(r"(\d+)-?bit|[fF][pP]?16", name)
    kind = f"{found[1] or 16}-bit" if found is not None else "4-bit"
    return (kind, _weight_bits(KINDS[kind])) if kind in KINDS else ("4-bit", _weight_bits(4))


def measure_mlx_speed(
    kinds: Iterable[str], report: Callable[[str], None] = lambda text: None, *, again: bool = False
) -> MachineSpeed:
    """Return the stored rates. Those of `kinds` that are not stored are measured first, or with `again` all of `kinds`,
    and then stored. Raises Cancelled.

    Takes a few seconds for each kind, in a child process. Kinds that MLX or the memory does not allow are left out.
    """
    stored = load_mlx_speed()
    missing = sorted(KINDS.keys() & set(kinds) - (set() if again else stored.rates.keys()))
    if not missing:
        return stored
    report(f"measuring this machine once, with weights of {len(missing)} kinds for MLX: {', '.join(missing)} …")
    speed = add_rates(stored, _measure, missing)
    if speed is not stored:
        save_entry(_path(), {"setting": _setting(), "rates": speed.rates}, "rates")
    return speed


def load_mlx_speed() -> MachineSpeed:
    """What is stored for this machine and runtime."""
    return load_entry(_path(), "rates", _setting(), read_rates) or MachineSpeed()


def _measure(kinds: list[str]) -> dict[str, dict[int, float]]:
    from edgespec.backends.mlx.shape import open_shape

    vocabulary = find_packaged(PackagedFile("python-6m/target.gguf"))
    assert vocabulary is not None
    rates = {}
    for kind in kinds:
        bits = KINDS[kind]
        block_bytes = _BLOCK_WEIGHTS * _weight_bits(bits) / 8
        blocks = math.ceil(_BYTES / block_bytes)
        shape = open_shape(vocabulary, width=_WIDTH, feed_forward=_FEED_FORWARD, blocks=blocks, bits=bits)
        with closing(shape), closing(shape.open_session()) as session:
            seconds = measure_rows(session, _PROFILE_S)
        rates[kind] = {n: each / (blocks * block_bytes) for n, each in seconds.items()}
    return rates


def _find_kind(folder: Folder) -> str | None:
    quantization = folder.config.get("quantization")
    bits: Any = quantization.get("bits") if isinstance(quantization, dict) else None
    return next((kind for kind, each in KINDS.items() if each == bits), None)


def _weight_bits(bits: int | None) -> float:
    """Bits of a weight in a file, with its part of a scale and a bias of 16 bits each."""
    return 16.0 if bits is None else bits + 32 / 64


def _path() -> Any:
    return calibration_folder() / "mlx-weights.json"


def _setting() -> dict[str, Any]:
    setting = current_setting("mlx", LoadOptions())
    return {"processor": setting["processor"], "runtime": setting["runtime"], "shape": _VERSION}
