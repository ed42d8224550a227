"""Memory that training a draft model needs, estimated from its header; neither weights nor MLX are loaded."""

from __future__ import annotations

from math import prod
from pathlib import Path

from edgespec.formats.gguf_config import read_gguf_config
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.head_config import unpack_shapes
from edgespec.formats.head_file import read_folder_shapes
from edgespec.formats.mlx_folder import read_folder

_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
# Numbers in single precision: AdamW's moments of a trained weight; its gradient before and after clipping, and its
# update; and what a token keeps for the backward pass, for each of its numbers in a layer, and for each score. The last
# two are fitted to MLX's peaks.
_MOMENTS, _IN_STEP, _PER_HIDDEN, _PER_LOGIT = 2, 3, 38, 4
_MARGIN = 1.1
BYTES_PER_WEIGHT = 4 * (1 + _MOMENTS + _IN_STEP)
"""Bytes that a trained weight takes, with what a step keeps of it."""


def estimate_training_bytes(path: Path, batch_tokens: int, *, rank: int | None = None) -> int:
    """Bytes to train a draft model with AdamW on batches of so many tokens, in parts of 512 tokens at most.

    rank  of LoRA; None to train all weights

    Raises InvalidModelFile, CacheError.
    """
    (width, n_layers, vocab_size), shapes = _read_sizes(path)
    n_weights = n_trained = sum(map(prod, shapes.values()))
    if rank is not None:
        blocks = [shape for name, shape in shapes.items() if len(shape) == 2 and (".layers." in name or "blk." in name)]
        n_trained = sum(rank * sum(shape) for shape in blocks)
        n_weights += n_trained
    kept = batch_tokens * (_PER_HIDDEN * width * n_layers + _PER_LOGIT * vocab_size)
    return int(_MARGIN * 4 * (n_weights + _MOMENTS * n_trained + max(kept, _IN_STEP * n_trained)))


def _read_sizes(path: Path) -> tuple[list[int], dict[str, tuple[int, ...]]]:
    """(sizes by _SIZES, shapes of the tensors) of a GGUF file or folder."""
    if path.is_dir():
        folder = read_folder(path)
        shapes = unpack_shapes(folder.config, read_folder_shapes(path))
        sizes = [folder.integer(key) or 0 for key in _SIZES]
        return sizes, {name: shape for name, shape in shapes.items() if not name.endswith((".scales", ".biases"))}
    header = read_file(path)
    config = read_gguf_config(header)
    return [config[key] for key in _SIZES], {tensor.name: tensor.shape for tensor in header.tensors}
