"""Memory that training a draft model needs, estimated from its header; neither weights nor MLX are loaded."""

from __future__ import annotations

from math import prod
from pathlib import Path

from edgespec.formats.gguf_config import read_gguf_config
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.head_config import unpack_shapes
from edgespec.formats.head_file import read_folder_shapes
from edgespec.formats.mlx_folder import Folder, read_folder

_FLOAT_BYTES = 4
_MOMENTS = 2  # AdamW's, of each trained weight
_IN_STEP = (
    3  # for each trained weight, after the backward pass: its gradient, before and after clipping, and its update
)
_SEQUENCE = 512  # tokens; texts are cut into parts of at most so many
# Single-precision numbers that a layer keeps for the backward pass, for each token. Fitted to MLX's peaks.
_PER_HIDDEN, _PER_FEED_FORWARD, _PER_HEAD_PAIR = 9, 5, 1.5
_PER_LOGIT = 4
_MARGIN = 1.1


def estimate_training_bytes(path: Path, batch_tokens: int, *, rank: int | None = None) -> int:
    """Bytes to train a draft model with AdamW on batches of so many tokens, in parts of 512 tokens at most.

    rank  of LoRA; None to train all weights

    Raises InvalidModelFile, CacheError.
    """
    sizes, shapes = _read_folder(path) if path.is_dir() else _read_gguf(path)
    n_weights = sum(prod(shape) for shape in shapes.values())
    n_trained = n_weights
    if rank is not None:
        blocks = [shape for name, shape in shapes.items() if len(shape) == 2 and (".layers." in name or "blk." in name)]
        n_trained = sum(rank * sum(shape) for shape in blocks)
        n_weights += n_trained
    in_layer = (
        _PER_HIDDEN * sizes["hidden_size"]
        + _PER_FEED_FORWARD * sizes["intermediate_size"]
        + _PER_HEAD_PAIR * sizes["num_attention_heads"] * min(batch_tokens, _SEQUENCE)
    )
    per_token = sizes["num_hidden_layers"] * in_layer + _PER_LOGIT * sizes["vocab_size"]
    in_step = max(per_token * batch_tokens, _IN_STEP * n_trained)
    return int(_MARGIN * _FLOAT_BYTES * (n_weights + _MOMENTS * n_trained + in_step))


Sizes = dict[str, int]
Shapes = dict[str, tuple[int, ...]]


def _read_gguf(path: Path) -> tuple[Sizes, Shapes]:
    header = read_file(path)
    return read_gguf_config(header), {tensor.name: tensor.shape for tensor in header.tensors}


def _read_folder(path: Path) -> tuple[Sizes, Shapes]:
    folder = read_folder(path)
    shapes = unpack_shapes(folder.config, read_folder_shapes(path))
    scales = tuple(f".{kind}" for kind in ("scales", "biases"))
    hidden = _size(folder, "hidden_size", 0)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": _size(folder, "intermediate_size", 4 * hidden),
        "num_attention_heads": _size(folder, "num_attention_heads", 1),
        "num_hidden_layers": _size(folder, "num_hidden_layers", 1),
        "vocab_size": _size(folder, "vocab_size", 0),
    }
    return sizes, {name: shape for name, shape in shapes.items() if not name.endswith(scales)}


def _size(folder: Folder, key: str, default: int) -> int:
    return folder.integer(key) or default
