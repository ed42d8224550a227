"""Makers of tiny random-weight MLX model folders, by mlx-lm's own classes."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from tests.gguf_models import TARGET, vocabulary_fields

DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    # every sixth layer sees everything, the others a window of 24 tokens
    "sliding-window": {
        **DENSE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 24,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 32,
        "rms_norm_eps": 1e-6,
    },
    "moe": {
        **DENSE,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "rope_theta": 10000.0,
    },
    # three layers with a recurrent state to one of attention
    "hybrid": {
        **DENSE,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 4,
    },
    "recurrent": {
        "model_type": "mamba",
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
        "tie_word_embeddings": False,
    },
}


def make_model(config: dict[str, Any], seed: int = 0) -> Any:
    """A model of random weights whose logits have a standard deviation of about 3."""
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    head = getattr(model, "lm_head", None)
    if head is not None:
        spread = mx.std(model(mx.array([[5, 9, 21, 3]])))
        head.weight = head.weight * (3 / spread)
    mx.eval(model.parameters())
    return model


def make_folder(path: Path, config: dict[str, Any], *, bits: int | None = None, seed: int = 0) -> Path:
    """A model folder of the packaged vocabulary; with `bits`, quantized to so many in groups of 32."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**config, "vocab_size": len(vocabulary_fields()["tokens"]), "eos_token_id": 0, "bos_token_id": 0}
    model = make_model(config, seed)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    save(path, model, config)
    return path


def save(path: Path, model: Any, config: dict[str, Any]) -> None:
    """Weights, config and the packaged vocabulary's tokenizer."""
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    for name, text in _tokenizer_files().items():
        (path / name).write_text(text)


def load_target() -> MlxModel:
    """The packaged target in single precision: the CPU build multiplies 8-bit matrices ten times as slowly."""
    model = load(TARGET, LoadOptions(context_size=256))
    dequantize_model(model._model)
    return model


@cache
def _tokenizer_files() -> dict[str, str]:
    fields = vocabulary_fields()
    vocabulary = {token: i for i, token in enumerate(fields["tokens"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in fields["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(fields["tokens"], fields["token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos_token": special[0], "eos_token": special[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(names)}
