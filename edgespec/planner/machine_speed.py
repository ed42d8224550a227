"""How fast this machine reads weights of each type, to estimate the speed of models that are not here.

The time of a forward is nearly proportional to the bytes of the weights that it reads. The seconds of a byte, by type
and number of rows, are measured once on a few blocks of a common shape, and stored.
"""

from __future__ import annotations

import importlib.resources
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.backends import open_model
from edgespec.backends.isolated import ChildDied, run_in_child
from edgespec.backends.llamacpp.shape import write_shape
from edgespec.backends.options import LoadOptions
from edgespec.controller.profiler import measure_rows
from edgespec.controller.store import ProfileKey, calibration_folder, read_entries, save_entry
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, BackendUnavailable, CacheError
from edgespec.formats.ggml_types import GGML_TYPES
from edgespec.formats.gguf import Header, TensorInfo
from edgespec.formats.gguf_validate import read_file
from edgespec.planner.speed import read_bytes

_VERSION = 1  # of the measured shape
_WIDTH, _FEED_FORWARD, _BLOCKS = 2048, 8192, 8  # 1.0 GiB in F16, 0.3 GiB in Q4_K: more than the caches of a CPU
_PROFILE_S = 2.0
_CONTEXT = 512
_ROUND_S = 4e-4  # of the loop in each round, outside of the forward
_TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
MEASURABLE = frozenset({"Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "MXFP4", "IQ4_XS", "Q3_K", "Q2_K", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Rate:
    """Seconds of a byte that is read, by rows of the forward."""

    rows: Mapping[int, float]

    def forward_s(self, n_bytes: float) -> dict[int, float]:
        """Seconds of a round by rows, for a model of which one row reads `n_bytes`."""
        return {rows: _ROUND_S + byte_s * n_bytes for rows, byte_s in self.rows.items()}


def load_rate(type_name: str) -> Rate | None:
    """What is stored for this machine and runtime; None where nothing is."""
    for entry in read_entries(_path(type_name), "rate"):
        if entry["setting"] == _setting():
            try:
                return Rate({int(rows): float(seconds) for rows, seconds in entry["rate"].items()})
            except (TypeError, ValueError):
                return None
    return None


def measure_rate(type_name: str, check: CheckCancelled = lambda: None) -> Rate | None:
    """Measure and store; takes a few seconds. None where llama.cpp or the memory does not allow it. Raises Cancelled.

    Runs in a child process, which may abort.
    """
    if type_name not in MEASURABLE:
        return None
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
        try:
            rate = run_in_child(_measure, type_name, Path(folder), check=check)
        except (ChildDied, BackendError, BackendUnavailable, CacheError):
            return None
    save_entry(_path(type_name), {"setting": _setting(), "rate": {str(n): s for n, s in rate.rows.items()}}, "rate")
    return rate


def _measure(type_name: str, folder: Path) -> Rate:
    header = _make_header(type_name)
    path = folder / "shape.gguf"
    write_shape(header, _BLOCKS, path)
    options = LoadOptions(context_size=_CONTEXT, mmap=False)
    model = open_model("llamacpp", path, options, progress=lambda fraction: None, check=lambda: None)
    try:
        session = model.open_session(lambda: None)
        try:
            n_bytes = read_bytes(header, -1, _BLOCKS)
            return Rate({rows: seconds / n_bytes for rows, seconds in measure_rows(session, _PROFILE_S).items()})
        finally:
            session.close()
    finally:
        model.close()


def _make_header(type_name: str) -> Header:
    """A model of the shape, with the embedded model's vocabulary and matrices of the type."""
    asset = importlib.resources.files("edgespec") / "assets" / "python-6m" / "target.gguf"
    with importlib.resources.as_file(asset) as path:
        embedded = read_file(path)
    sizes = {
        "embedding_length": _WIDTH,
        "feed_forward_length": _FEED_FORWARD,
        "block_count": _BLOCKS,
        "attention.head_count": _WIDTH // 64,
        "attention.head_count_kv": _WIDTH // 256,
        "rope.dimension_count": 64,
        "attention.key_length": 64,
        "attention.value_length": 64,
    }
    width, wide, narrow = _WIDTH, _FEED_FORWARD, _WIDTH // 4
    block = {"attn_q": (width, width), "attn_k": (width, narrow), "attn_v": (width, narrow),
             "attn_output": (width, width), "ffn_gate": (width, wide), "ffn_up": (width, wide),
             "ffn_down": (wide, width), "attn_norm": (width,), "ffn_norm": (width,)}  # fmt: skip
    vocab = next(tensor.shape[1] for tensor in embedded.tensors if tensor.name == "token_embd.weight")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, vocab), "output_norm.weight": (width,)}
    for i in range(_BLOCKS):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensor = TensorInfo(name, shape, _TYPES["F32" if len(shape) == 1 else type_name], offset)
        tensors.append(tensor)
        offset += math.ceil(tensor.nbytes / 32) * 32
    metadata = {**embedded.metadata, **{f"{embedded.architecture}.{key}": size for key, size in sizes.items()}}
    return replace(embedded, name="shape", metadata=metadata, tensors=tuple(tensors))


def _path(type_name: str) -> Path:
    return calibration_folder() / f"weights-{type_name.lower()}.json"


def _setting() -> dict[str, Any]:
    """As JSON reads it back."""
    key = ProfileKey.current("llamacpp", LoadOptions())
    return {"processor": key.processor, "runtime": key.runtime, "shape": _VERSION}
