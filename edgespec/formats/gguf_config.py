"""The config of a GGUF model of the llama kind, as a model folder of the same model states it."""

from __future__ import annotations

from typing import Any

from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf import Header

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3: [head size / 2], by which the wavelengths are multiplied


def read_gguf_config(header: Header) -> dict[str, Any]:
    """The config.json of a llama, qwen2 or qwen3, in mlx-lm's keys.

    Raises InvalidModelFile for another architecture, a mixture of experts, rotary positions of another kind, and a
    header that states no usable sizes.
    """
    arch = header.architecture
    if arch not in ARCHITECTURES:
        raise _refuse(header, f"only {', '.join(ARCHITECTURES)} files are read, and this one is {arch}")
    if header.own("expert_count"):
        raise _refuse(header, "it is a mixture of experts")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise header.invalid("it has no token embedding (token_embd.weight)")
    hidden, heads = header.size("embedding_length"), header.size("attention.head_count")
    head_size = header.own("attention.key_length") or hidden // heads
    rotated = header.own("rope.dimension_count")
    if rotated not in (None, head_size):
        raise _refuse(header, f"{rotated} numbers of a head of {head_size} are rotated")
    scaling = header.metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise _refuse(header, f"its rotary positions are scaled by {scaling}")
    factor = _number(header, "rope.scaling.factor", 1.0)
    return {
        "model_type": arch,
        "hidden_size": hidden,
        "num_hidden_layers": header.size("block_count"),
        "intermediate_size": header.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.own("attention.head_count_kv") or heads,
        "head_dim": head_size,
        "rms_norm_eps": _number(header, "attention.layer_norm_rms_epsilon", 1e-5),
        "vocab_size": shapes["token_embd.weight"][-1],
        "max_position_embeddings": header.trained_context or 2048,
        "rope_theta": _number(header, "rope.freq_base", 10_000.0),
        "rope_traditional": arch == "llama",  # whose queries and keys are stored in the order of interleaved pairs
        "rope_scaling": None if scaling == "none" else {"type": scaling, "factor": factor},
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _number(header: Header, key: str, default: float) -> float:
    found = header.metadata.get(f"{header.architecture}.{key}", default)
    if not isinstance(found, float):
        raise header.invalid(f"{header.architecture}.{key} is not a number")
    return found


def _refuse(header: Header, why: str) -> InvalidModelFile:
    return InvalidModelFile(
        f"{header.name} cannot be opened on MLX: {why}.", hint="Use a folder with MLX weights of this model."
    )


PARTS = {  # parts of tensors' names in GGUF files -> the same in model folders
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_PARTS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def to_folder_name(name: str) -> str:
    """'blk.0.attn_q.weight' -> 'model.layers.0.self_attn.q_proj.weight'. Raises KeyError for a name of neither kind."""
    part, _, kind = name.rpartition(".")
    if not part.startswith("blk."):
        return f"{PARTS[part]}.{kind}"
    _, layer, inner = part.split(".", 2)
    return f"model.layers.{layer}.{(PARTS | _QWEN3_PARTS)[inner]}.{kind}"
