"""Loads the packaged pair, Q8_0 GGUF files, as MLX models with 8-bit groups of 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf_config import read_gguf_config
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.tensor_names import to_folder_name


def load_gguf_llama(path: Path) -> tuple[Any, dict[str, Any]]:
    """A llama model whose matrices are all Q8_0, and its configuration in mlx-lm's keys. Raises InvalidModelFile."""
    header = read_file(path)
    if header.architecture != "llama":
        raise InvalidModelFile(
            f"MLX opens GGUF files of llama models only, and {path.name} is not one.", hint="Use --backend llamacpp."
        )
    config = read_gguf_config(header)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {to_folder_name(name): array for name, array in mx.load(str(path)).items()}
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda name, module: f"{name}.scales" in weights)
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    return model, config
