"""The arrays of a head in a GGUF file, as they are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn

from edgespec.backends import Model
from edgespec.backends.mlx.heads.parts import LayerShape, make_layer_shape
from edgespec.backends.mlx.heads.target_parts import TargetParts, read_target
from edgespec.backends.mlx.model import MlxModel
from edgespec.errors import DraftRefused
from edgespec.formats.gguf_validate import read_file

_ROWS = 8192  # of the embeddings that are converted at once
_LAYER = "midlayer."
PARTS = {  # neutral names (formats.heads): those in folders, and in GGUF files
    "fc": ("fc", "fc"),
    "embedding_norm": (f"{_LAYER}input_layernorm", "blk.0.attn_norm"),
    "feature_norm": (f"{_LAYER}hidden_norm", "blk.0.attn_norm_2"),
    "q": (f"{_LAYER}self_attn.q_proj", "blk.0.attn_q"),
    "k": (f"{_LAYER}self_attn.k_proj", "blk.0.attn_k"),
    "v": (f"{_LAYER}self_attn.v_proj", "blk.0.attn_v"),
    "o": (f"{_LAYER}self_attn.o_proj", "blk.0.attn_output"),
    "ffn_norm": (f"{_LAYER}post_attention_layernorm", "blk.0.ffn_norm"),
    "gate": (f"{_LAYER}mlp.gate_proj", "blk.0.ffn_gate"),
    "up": (f"{_LAYER}mlp.up_proj", "blk.0.ffn_up"),
    "down": (f"{_LAYER}mlp.down_proj", "blk.0.ffn_down"),
    "output_norm": ("norm", "output_norm"),
    "output": ("lm_head", "output"),
    "embedding": ("embed_tokens", "token_embd"),
    "input_norm": ("input_norm", "enc.output_norm"),
}
GGUF_NAMES = {neutral: f"{name}.weight" for neutral, (_, name) in PARTS.items()} | {"d2t": "d2t"}


def read_gguf_arrays(path: Path) -> tuple[dict[str, Any], dict[str, str], LayerShape]:
    """(arrays by the names of an EAGLE-3 file, neutral names -> these, shape of the layer).

    Raises InvalidModelFile, CacheError, and DraftRefused for a head that scores with its target's output matrix.
    """
    header = read_file(path)
    tensors = find_tensors(path)
    names = {neutral: name for neutral, name in GGUF_NAMES.items() if name in tensors}
    if "output" not in names:
        raise DraftRefused(
            f"{path.name} has no output matrix of its own.", hint="Train a new head: edgespec draft train."
        )
    if unknown := sorted(set(tensors) - set(names.values())):
        raise DraftRefused(f"{path.name} has the tensor {unknown[0]}, which is not trained.", hint="Use another head.")
    arrays = {name: mx.array(each.data) if name == "d2t" else dequantize(each) for name, each in tensors.items()}
    config = {
        "hidden_size": header.size("embedding_length"),
        "num_attention_heads": header.size("attention.head_count"),
        "num_key_value_heads": header.own("attention.head_count_kv"),
        "head_dim": header.own("attention.key_length"),
        "rms_norm_eps": header.metadata.get("eagle3.attention.layer_norm_rms_epsilon"),
        "rope_theta": header.metadata.get("eagle3.rope.freq_base"),
        "rope_traditional": True,  # llama.cpp rotates neighbours
    }
    return arrays, names, make_layer_shape(config, path.name)


def read_parts(target: Model, path: Path) -> TargetParts:
    """What a head shares with the target at `path`. Raises InvalidModelFile, CacheError."""
    if isinstance(target, MlxModel):
        return read_target(target.network)
    embedding = find_tensors(path)["token_embd.weight"]
    parts = [slice(at, at + _ROWS) for at in range(0, len(embedding.data), _ROWS)]
    rows = nn.Embedding(1, 1)
    rows.weight = mx.concatenate([dequantize(embedding, part).astype(mx.float16) for part in parts])
    vocab_size, size = rows.weight.shape
    return TargetParts(rows, vocab_size, size, rows, rows.as_linear)


def find_tensors(path: Path) -> dict[str, Any]:
    return {each.name: each for each in gguf.GGUFReader(path).tensors}


def dequantize(tensor: Any, rows: Any = slice(None)) -> Any:
    """Some rows of a GGUF file's tensor, float32."""
    return mx.array(gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type))
