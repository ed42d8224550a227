"""Tensor names of the llama, qwen2 and qwen3 architectures: GGUF -> Hugging Face."""

from __future__ import annotations

PARTS = {
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
