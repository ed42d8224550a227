"""Model files made of others: of fewer blocks and zero weights, to time forwards on; of fewer bits; of fewer layers."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.devices import host_memory
from edgespec.backends.llamacpp.library import ggml, library
from edgespec.backends.options import idle_cores
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, CacheError, DoesNotFit
from edgespec.files import replace_file
from edgespec.formats.gguf import GGML_IDS, GgmlType, Header, TensorInfo
from edgespec.formats.gguf_validate import read_file
from edgespec.units import gib

_SPARE_BYTES = 256 * 2**20  # left free on the disk


def write_shape(header: Header, blocks: int, path: Path) -> None:
    """Write a GGUF file with the first `blocks` blocks of the model that `header` describes; all weights are zero.

    The time of a forward does not depend on the weights, except that a zero router chooses the same experts for every
    row. Raises CacheError where the disk is too small.
    """
    needed = sum(tensor.nbytes for tensor in header.tensors if tensor.block < blocks) + _SPARE_BYTES
    if shutil.disk_usage(path.parent).free < needed:
        raise CacheError(
            f"{path.parent} has no room for a measurement of {needed / 2**30:.1f} GiB.", hint="Free some disk space."
        )
    write_blocks(header, range(blocks), path, lambda tensor: np.zeros(tensor.nbytes, np.uint8))


def write_blocks(
    header: Header, kept: Sequence[int], path: Path, read: Callable[[TensorInfo], npt.NDArray[np.uint8]]
) -> None:
    """Write a file with the blocks `kept` (ascending) of the model of `header`; `read` returns a tensor's bytes."""
    import gguf

    writer = gguf.GGUFWriter(path, header.architecture)
    counts = {"block_count": len(kept), "nextn_predict_layers": 0}
    counts["leading_dense_block_count"] = sum(b < (header.own("leading_dense_block_count") or 0) for b in kept)
    changed = {f"{header.architecture}.{key}": count for key, count in counts.items()}
    all_blocks = header.own("block_count") or 0
    for key, value in header.metadata.items():
        if key not in ("general.architecture", "general.alignment") and not key.startswith("split."):
            _add(writer, key, changed.get(key, value), all_blocks, kept)
    number = {-1: -1, **{block: at for at, block in enumerate(kept)}}
    tensors = [tensor for tensor in header.tensors if tensor.block in number]
    for tensor in tensors:
        block, kind = number[tensor.block], gguf.GGMLQuantizationType(GGML_IDS[tensor.type.name])
        name = tensor.name if block < 0 else f"blk.{block}.{tensor.name.split('.', 2)[2]}"
        writer.add_tensor_info(name, _shape(tensor), np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(read(tensor))
    writer.close()


def _shape(tensor: TensorInfo) -> tuple[int, ...]:
    """Slowest dimension first; the last counts bytes."""
    return (*reversed(tensor.shape[1:]), tensor.type.nbytes(tensor.shape[0]))


def count_blocks(header: Header) -> int:
    """Blocks of a model without its MTP layers, which come last."""
    return (header.own("block_count") or 0) - (header.own("nextn_predict_layers") or 0)


def _add(writer: Any, key: str, value: Any, all_blocks: int, kept: Sequence[int]) -> None:
    """Add a value in the type that llama.cpp expects; arrays with an item per block keep those of `kept`."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if 0 <= value < 2**32 else writer.add_int64)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value if math.isfinite(value) else 0.0)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif len(value):
        items = value.tolist() if isinstance(value, np.ndarray) else value
        per_block = len(items) == all_blocks and not key.startswith("tokenizer.") and not key.endswith("_sections")
        writer.add_array(key, [items[block] for block in kept] if per_block else items)


# A model file with some of its blocks only, for drafts that skip layers; in memory where the system can.


_USE = "Use --draft ngram, or qspec."


@dataclass(frozen=True, slots=True)
class Part:
    """A copy of a model with some of its blocks. `has_equal_blocks`: all blocks of the model have the same tensors."""

    path: Path
    nbytes: int
    has_equal_blocks: bool


def no_skip_reason(header: Header, kept: Sequence[int]) -> str | None:
    """Why a file with only the blocks `kept` would be another model, as part of a sentence; None where it is not.

    The copy keeps the kinds of blocks that arrays of the metadata state. Where there is no array, llama.cpp computes
    the kind from the number.
    """
    architecture = header.architecture
    has_gap = tuple(kept) != tuple(range(len(kept)))
    by_number = f"layers of {architecture} by number, so only the last can be skipped"
    has_windows = any("sliding_window" in key for key in header.metadata)
    states_windows = _states_blocks(header, "attention.sliding_window_pattern")
    states_recurrent = _states_blocks(header, "attention.recurrent_layers") or 0 in (
        header.per_block("attention.head_count_kv") or ()
    )
    reasons: dict[str, object] = {
        "its weights are split over several files": (header.integer("split.count") or 1) > 1,
        f"the layers of {architecture} share tables that cannot be split": any(
            tensor.name.startswith("per_layer_") for tensor in header.tensors
        ),
        f"llama.cpp finds the recurrent {by_number}": has_gap and _is_hybrid(header) and not states_recurrent,
        f"llama.cpp finds the window {by_number}": has_gap and has_windows and not states_windows,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _states_blocks(header: Header, key: str) -> bool:
    """Whether the metadata has an array of values of the blocks."""
    return isinstance(header.metadata.get(f"{header.architecture}.{key}"), np.ndarray)


def _is_hybrid(header: Header) -> bool:
    recurrent = {tensor.block for tensor in header.tensors if ".ssm_" in tensor.name}
    has_interval = f"{header.architecture}.full_attention_interval" in header.metadata
    return has_interval or 0 < len(recurrent) < count_blocks(header)


def _has_equal_blocks(header: Header) -> bool:
    """Whether each block has tensors of the same names and shapes."""
    found: dict[int, set[tuple[str, tuple[int, ...]]]] = {block: set() for block in range(count_blocks(header))}
    for tensor in header.tensors:
        if tensor.block in found:
            found[tensor.block].add((tensor.name.split(".", 2)[2], tensor.shape))
    return len(set(map(frozenset, found.values()))) == 1


@contextmanager
def prune(path: Path, kept: Sequence[int], check: CheckCancelled) -> Iterator[Part]:
    """A copy of the model at `path` with only the blocks `kept` (ascending); removed on exit.

    On Linux the copy is anonymous memory, which a model loaded from it keeps mapped; elsewhere it is a temporary file.
    Raises Unsupported, DoesNotFit, BackendError, Cancelled.
    """
    header = read_file(path)
    if (reason := no_skip_reason(header, kept)) is not None:
        raise Unsupported(f"{path.name} cannot skip layers: {reason}.", hint=_USE)
    needed = sum(tensor.nbytes for tensor in header.tensors if tensor.block in (-1, *kept))
    if needed > (free := host_memory().usable):
        raise DoesNotFit(
            f"a copy of {len(kept)} layers of {path.name} takes {gib(needed)}, and {gib(free)} are free.",
            hint="Skip more layers, or use --draft ngram.",
        )

    def read(tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        check()
        data = np.fromfile(path, np.uint8, tensor.nbytes, offset=header.data_offset + tensor.offset)
        if len(data) < tensor.nbytes:
            raise OSError(0, "the file became shorter while it was read")
        return data

    with _open_copy(path.name) as copy:
        try:
            write_blocks(header, kept, copy, read)
            part = Part(copy, copy.stat().st_size, _has_equal_blocks(header))
        except OSError as error:
            raise BackendError(
                f"a copy of {len(kept)} layers of {path.name} could not be written: {error.strerror}.",
                hint="Skip more layers, or use --draft ngram.",
            ) from error
        yield part


@contextmanager
def _open_copy(name: str) -> Iterator[Path]:
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create(name), "wb") as file:
            yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")  # other processes can open it too
        return
    with tempfile.TemporaryDirectory(prefix="edgespec-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / name


# Write a quantized copy of a GGUF file, and quantize single matrices as llama.cpp does.


FTYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}


_BLOCK = 32  # weights of a block, of the types with the smallest ones


def quantize(source: Path, destination: Path, ftype: str) -> None:
    """Quantize every matrix of `source`, output and embeddings included, to `ftype` (a key of FTYPES).

    The destination appears only when it is complete. Raises CacheError, BackendError, InvalidModelFile.
    """
    lib = library()
    params = lib.api.llama_model_quantize_default_params()
    kept = [tensor for tensor in read_file(source).tensors if _must_keep_type(tensor)]
    places = [(f"^{re.escape(tensor.name)}$".encode(), GGML_IDS[tensor.type.name]) for tensor in kept]
    params.tt_overrides = (lib.api.llama_model_tensor_override * (len(places) + 1))(*places)  # the last one is empty
    params.ftype = FTYPES[ftype]
    params.nthread = idle_cores()
    params.allow_requantize = True
    params.pure = ftype in ("F16", "Q4_0", "Q8_0")
    try:
        with replace_file(destination) as partial:
            lib.log.clear_error()
            if lib.api.llama_model_quantize(os.fsencode(source), os.fsencode(partial), params) != 0:
                raise BackendError(
                    f"llama.cpp could not quantize {source.name} to {ftype}: {lib.log.reason()}.",
                    hint="Check that the file is a complete GGUF model and that the disk has room.",
                )
    except OSError as error:
        raise CacheError(
            f"cannot write to {destination.parent}: {error.strerror}.", hint="Choose another folder."
        ) from error


def _must_keep_type(tensor: TensorInfo) -> bool:
    """Whether a forward aborts on other types of `tensor`: norms are multiplied by element, and so are convolutions.

    llama.cpp leaves those out that it knows by name. It makes floats of 16 bits of rows that are no whole blocks.
    """
    return "norm" in tensor.name or tensor.shape[0] % _BLOCK != 0


def quantize_rows(rows: npt.NDArray[np.float32], kind: GgmlType) -> npt.NDArray[np.uint8]:
    """Rows [n, items] in a quantized type, as bytes [n, bytes of a row]. Raises BackendUnavailable.

    The type must be one that needs no importance matrix, and `items` a whole number of its blocks.
    """
    library()  # loads ggml
    rows = np.ascontiguousarray(rows, np.float32)
    n, items = rows.shape
    packed = np.empty((n, kind.nbytes(items)), np.uint8)
    ggml().ggml_quantize_chunk(GGML_IDS[kind.name], rows.ctypes.data, packed.ctypes.data, 0, n, items, None)
    return packed
