"""Tiny random-weight models of mlx-lm's classes, from one table of small values for the names their configs use."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import pkgutil
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

VOCABULARY = 128
LAYERS = 4

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "dim", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim", "swa_v_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "intermediate_size_mlp", "ffn_size"), 96),
    **dict.fromkeys(("ff_intermediate_size", "ffn_dim", "ffn_intermediate_size", "block_ff_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "top_k_experts", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "zero_expert_num", "decoder_sparse_step"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_freq", "moe_layer_interval"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layer_norm_eps", "layernorm_epsilon"), 1e-5),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "max_seq_len"), 512),
    **dict.fromkeys(("rope_theta", "swa_rope_theta", "rope_local_base_freq"), 10_000.0),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qk_norm", "conv_bias", "mamba_proj_bias"), False),
    **dict.fromkeys(("tie_word_embeddings", "use_qkv_bias", "qk_norm", "use_expert_bias", "use_cla"), False),
    **dict.fromkeys(("norm_topk_prob", "use_conv_bias", "post_norm", "mamba_conv_bias"), True),
    **dict.fromkeys(("routed_scaling_factor", "residual_multiplier", "embedding_multiplier", "scale_emb"), 1.0),
    **dict.fromkeys(("logits_scaling", "attention_multiplier", "scale_depth", "logit_scale"), 1.0),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "loop_window_size"), 24),
    **dict.fromkeys(("window_size", "attention_chunk_size"), 24),
    **dict.fromkeys(("conv_kernel", "conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv", "conv1d_width"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 32),
    **dict.fromkeys(("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 16),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    **dict.fromkeys(("index_topk",), 64),
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("index_head_dim",), 16),
    **dict.fromkeys(("layer_group_size", "full_attention_interval", "sliding_window_pattern"), 2),
    **dict.fromkeys(("expert_layer_period", "attn_layer_period", "dense_attention_every_n_layers"), 2),
    **dict.fromkeys(("expert_layer_offset", "attn_layer_offset"), 1),
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "time_step_rank": 8,
    "time_step_limit": (0.0, 100.0),
    "mamba_expand": 2,
    "rotary_dim": 8,
    "rotary_emb_base": 10_000,
    "group_norm_size": 1,
    "dim_model_base": 64,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layers_enum": "1,2,3",
    "mlp_only_layers": [],
    "mla_scale_q_lora": False,
    "mla_scale_kv_lora": False,
    "zero_expert_type": "identity",
    "attention_method": "MLA",
    "use_mixed_mlp_moe": False,
    "cla_share_factor": 1,
    "gegelu_limit": 20.0,
    "ffn_dim_divisor": 32,
    "ffn_multipliers": [1.0] * LAYERS,
    "logits_soft_cap": 30.0,
    "linear_allow_neg_eigval": False,
    "add_swa_attention_sink_bias": False,
    "add_full_attention_sink_bias": False,
    "hybrid_layer_pattern": [0, 1] * (LAYERS // 2),
    "no_rope_layers": [1] * LAYERS,
    "block_size": 512,
    "num_attention_groups": 2,
}
FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
_YARN = {"type": "yarn", "rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512, "mscale": 1.0,
         "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "rope_theta": 10_000.0}  # fmt: skip
_GEMMA4 = {"num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 2, "hidden_size_per_layer_input": 16}
_LFM2 = {"layer_types": ["conv", FULL] * 2, "full_attn_idxs": [1, 3], "block_dim": 64, "block_multiple_of": 32,
         "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True}  # fmt: skip
# What the table cannot say for a class.
EXTRA: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window_pattern": "LLLG", "rope_scaling": None},
    "exaone_moe": {"layer_types": [SLIDING, FULL] * 2, "is_moe_layer": [False, True, True, True]},
    "lfm2": _LFM2,
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2, "full_attn_idxs": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope",
                         "mamba_n_groups": 1},
    "gpt_oss": {"layer_types": [SLIDING, FULL] * 2, "rope_scaling": None},
    "olmo3": {"layer_types": [SLIDING, FULL] * 2},
    "olmo_hybrid": {"layer_types": [RECURRENT, FULL] * 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "_block_types": None, "lru_width": 64,
                        "attention_bias": False, "embeddings_scale_by_sqrt_dim": True, "num_key_value_heads": 1},
    "nemotron_h": {"hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "n_groups": 2},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128, "mamba_n_groups": 1, "mamba_d_head": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "gemma3n": {"layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16,
                "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * LAYERS,
                "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
                "final_logit_softcapping": 30.0, "rope_scaling": None},
    "step3p5": {"layer_types": [FULL, SLIDING] * 2},
    "openelm": {"num_query_heads": [4] * LAYERS, "num_kv_heads": [2] * LAYERS, "head_dim": 16},
    "cohere": {"use_qk_norm": False},
    "nanochat": {"num_key_value_heads": 2},
    "phi3": {"rope_scaling": None, "partial_rotary_factor": 1.0},
    "lfm2-vl": _LFM2,
    "phimoe": {"rope_scaling": None},
    "afm7": {"num_kv_reuse_layers": 2},
    "baichuan_m1": {"sliding_window_layers": [1], "conv_window": 2},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
    "deepseek_v2": {"rope_scaling": _YARN},
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4,
    "glm4_moe": {"rope_scaling": None, "partial_rotary_factor": 0.5},
    "glm_moe_dsa": {"rope_parameters": _ROPE},
    "hunyuan": {"rope_scaling": {"factor": 1.0, "alpha": 1.0, "type": "dynamic"}, "cla_share_factor": 2},
    "kimi_linear": {"linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4,
                                           "head_dim": 16, "short_conv_kernel_size": 4}},
    "llama4": {"interleave_moe_layer_step": 2, "rope_scaling": None, "num_experts_per_tok": 1},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "longcat_flash_ngram": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "mellum": {"rope_parameters": {FULL: _ROPE, SLIDING: _ROPE}, "layer_types": [SLIDING, FULL] * 2},
    "mimo_v2_flash": {"moe_layer_freq": [0, 1, 1, 1]},
    "ministral3": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}, "layer_types": [FULL] * LAYERS},
    "mistral4": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}] * LAYERS},
    "plamo": {"n_shared_head": 2, "num_key_value_heads": 4},
    "qwen": {"kv_channels": 16},
    "spark2_5": {"rope_parameters": {FULL: _ROPE, SLIDING: _ROPE}},
    "minicpm3": {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 512,
                                  "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}, "scale_depth": 1.0},
}  # fmt: skip


_TEXT = ("TextArgs", "TextConfig", "TextModelArgs")


def class_names() -> list[str]:
    """Every module of mlx-lm that holds a model. (olmo needs a package of its own, and ends the process without it.)"""
    names = [each.name for each in pkgutil.iter_modules(mlx_lm.models.__path__) if each.name != "olmo"]
    return [name for name in names if hasattr(_module(name), "ModelArgs")]


def tiny(name: str, config: dict[str, Any] | None = None) -> Any:
    """A model of this class in single precision, every parameter moved at random so that none is zero.

    Raises whatever the class raises for the values of `config`, by default those of the table.
    """
    module = _module(name)
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config or describe(name)))
    model.set_dtype(mx.float32)
    model.update(tree_map(lambda p: p + 0.05 * mx.random.normal(p.shape), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def describe(name: str, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """The config of `tiny`, with another number of tokens."""
    module = _module(name)
    config = _arguments(module.ModelArgs, name, vocabulary)
    if "text_config" in config:
        inner = next((found for each in _TEXT if (found := getattr(module, each, None))), None)
        inner = inner or _inner_arguments(module)
        config["text_config"] = {**_arguments(inner, name, vocabulary), "model_type": name}
    return config


def _arguments(kind: Any, name: str, vocabulary: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), vocabulary)
    known = {
        **SMALL,
        **sizes,
        "model_type": name,
        "layer_types": [FULL] * LAYERS,
        "text_config": {},
        **EXTRA.get(name, {}),
    }
    return {field.name: known[field.name] for field in dataclasses.fields(kind) if field.name in known}


def _inner_arguments(module: Any) -> Any:
    """The ModelArgs of the language model that a multimodal class wraps."""
    for value in vars(module).values():
        if type(value).__name__ == "module" and hasattr(value, "ModelArgs"):
            return value.ModelArgs
    raise TypeError("it has a text_config of unknown form")


def _module(name: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return importlib.import_module(f"mlx_lm.models.{name}")
