"""Writes GGUF files with some blocks of another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.formats.ggml_types import GGML_IDS
from edgespec.formats.gguf import Header, TensorInfo


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
