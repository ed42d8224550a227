"""Values in a GGUF header that llama.cpp does not survive: it asserts on them, and the process with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.formats.gguf import Header

# Limits compiled into llama.cpp.
MAX_BLOCKS = 512
_MAX_EXPERTS = 1024
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Architectures in which every layer attends; others may state 0 kv heads for some.
_DENSE = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")


def check_values(header: Header, tokens: list[str]) -> None:
    """Raises InvalidModelFile for the first value of the header that would abort the process."""
    for name, wrong in (
        ("layer norms", _norms(header)),
        ("rope scaling", _rope(header)),
        ("experts", _experts(header)),
        ("attention", _attention(header)),
        ("vocabulary", _vocabulary(header, tokens)),
    ):
        if wrong is not None:
            raise header.invalid(f"its {name} cannot be right: {wrong}")


def _own(header: Header, key: str) -> object:
    return header.metadata.get(f"{header.architecture}.{key}")


def _norms(header: Header) -> str | None:
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        epsilon = _own(header, key)
        if isinstance(epsilon, float) and not 0 <= epsilon < math.inf:
            return f"{key} is {epsilon}"
    return None


def _rope(header: Header) -> str | None:
    kind = _own(header, "rope.scaling.type")
    return f"the type is {kind!a}" if kind is not None and kind not in _ROPE_SCALINGS else None


def _experts(header: Header) -> str | None:
    count, used = header.own("expert_count") or 0, header.own("expert_used_count") or 0
    if (count or used) and not 1 <= used <= count <= _MAX_EXPERTS:
        return f"{used} of {count} are used"
    return None


def _attention(header: Header) -> str | None:
    blocks = header.own("block_count") or 0
    nextn = header.own("nextn_predict_layers") or 0
    if not 0 <= nextn <= blocks:
        return f"{nextn} of {blocks} layers predict further tokens"
    if _own(header, "attention.causal") is False:
        return "it looks ahead, as no model that writes text does"
    heads, kv_heads = header.per_block("attention.head_count"), header.per_block("attention.head_count_kv")
    if header.architecture in _DENSE and heads and kv_heads:
        for n, n_kv in zip(heads, kv_heads, strict=False):
            if n_kv < 1 or n % n_kv:
                return f"{n} heads share {n_kv} key-value heads"
    return None


def _vocabulary(header: Header, tokens: list[str]) -> str | None:
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind in ("no_vocab", "none"):
        return "there is none"
    seen = set(tokens)
    if "" in seen or "\0" in "".join(
        tokens
    ):  # llama.cpp ends a token at its first NUL, and names an empty one by its id
        seen = {token.split("\0", 1)[0] or f"[EMPTY_{i}]" for i, token in enumerate(tokens)}
    if len(seen) != len(tokens):
        return f"{len(tokens) - len(seen):,} tokens stand in it twice"
    if kind == "llama" and (lacking := [b for b in range(256) if f"<0x{b:02X}>" not in seen and chr(b) not in seen]):
        return f"there is no token for byte {lacking[0]}"
    return None
