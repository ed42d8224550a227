"""Packaged GGUF files as MLX models whose matrices stay quantized, in groups of 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf_config import read_gguf_config, to_folder_name
from edgespec.formats.gguf_validate import read_file

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # the types that `mx.load` reads as they are


def load_gguf_llama(path: Path) -> tuple[Any, dict[str, Any]]:
    """A llama model whose matrices are of _BITS, and its configuration in mlx-lm's keys. Raises InvalidModelFile."""
    header = read_file(path)
    if header.architecture != "llama":
        raise InvalidModelFile(
            f"MLX opens GGUF files of llama models only, and {path.name} is not one.", hint="Use --backend llamacpp."
        )
    config = read_gguf_config(header)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {to_folder_name(name): array for name, array in mx.load(str(path)).items()}
    bits = {
        to_folder_name(tensor.name).removesuffix(".weight"): _BITS[tensor.type.name]
        for tensor in header.tensors
        if tensor.type.name in _BITS
    }
    nn.quantize(
        model,
        class_predicate=lambda name, module: {"group_size": 32, "bits": bits[name]} if name in bits else False,
    )
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    return model, config
