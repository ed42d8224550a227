"""Loads the packaged pair, Q8_0 GGUF files, as MLX models with 8-bit groups of 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from edgespec.errors import InvalidModelFile
from edgespec.formats.tensor_names import PARTS


def load_gguf_llama(path: Path) -> tuple[Any, dict[str, Any]]:
    """A llama model whose matrices are all Q8_0, and its configuration in mlx-lm's keys. Raises InvalidModelFile."""
    arrays, metadata = mx.load(str(path), return_metadata=True)
    if metadata.get("general.architecture") != "llama":
        raise InvalidModelFile(
            f"MLX opens GGUF files of llama models only, and {path.name} is not one.", hint="Use --backend llamacpp."
        )

    def number(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    config = {
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "vocab_size": number("vocab_size"),
        "max_position_embeddings": number("context_length"),
        "rope_theta": number("rope.freq_base"),
        "rope_traditional": True,  # GGUF stores a llama's queries and keys in the order of interleaved pairs
        "tie_word_embeddings": "output.weight" not in arrays,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {_map_name(name): array for name, array in arrays.items()}
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda name, module: f"{name}.scales" in weights)
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    return model, config


def _map_name(name: str) -> str:
    part, kind = name.rsplit(".", 1)
    if not part.startswith("blk."):
        return f"{PARTS[part]}.{kind}"
    _, layer, inner = part.split(".", 2)
    return f"model.layers.{layer}.{PARTS[inner]}.{kind}"
