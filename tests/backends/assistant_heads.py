"""Random-weight Gemma 4 models and their assistants as GGUF files, and the forward passes of both in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.backends.numpy_layers import attend, normed, read_tensors
from tests.gguf_models import GgufBuilder

WIDTH, SIZE, HEADS, KV_HEADS, FFN, WINDOW = 64, 32, 4, 2, 96, 12
HEAD, HEAD_SWA = 64, 32  # numbers of a head of full layers, and of those with a window
BASE, BASE_SWA = 1_000_000.0, 10_000.0
TARGET_WINDOWS, WINDOWS = (True, False), (True, True, False)


def make_target(path: Path, *, windows: Sequence[bool] = TARGET_WINDOWS, kv_heads: int = KV_HEADS) -> Path:
    """A dense gemma4 of a layer with a window and a full one."""
    m = _builder(path, "gemma4", windows, WIDTH, kv_heads)
    m.writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    m.matrix("token_embd", m.vocab_size, WIDTH, gain=1.0)
    m.matrix("output", m.vocab_size, WIDTH, gain=3.0)
    _norm(m, "output_norm", WIDTH)
    for i, is_window in enumerate(windows):
        _write_layer(m, f"blk.{i}", WIDTH, is_window)
        head = HEAD_SWA if is_window else HEAD
        m.matrix(f"blk.{i}.attn_k", kv_heads * head, WIDTH)
        m.matrix(f"blk.{i}.attn_v", kv_heads * head, WIDTH)
        _norm(m, f"blk.{i}.attn_k_norm", head)
    m.save()
    return path


def make_assistant(path: Path, *, hidden: int = WIDTH) -> Path:
    """Three layers, of which the last is full."""
    m = _builder(path, "gemma4-assistant", WINDOWS, SIZE, KV_HEADS, seed=5)
    m.writer.add_uint32("gemma4-assistant.embedding_length_out", hidden)
    m.writer.add_uint32("gemma4-assistant.nextn_predict_layers", len(WINDOWS))
    m.matrix("token_embd", m.vocab_size, SIZE, gain=3.0)
    _norm(m, "output_norm", SIZE)
    m.matrix("nextn.pre_projection", SIZE, 2 * hidden)
    m.matrix("nextn.post_projection", hidden, SIZE)
    for i, is_window in enumerate(WINDOWS):
        _write_layer(m, f"blk.{i}", SIZE, is_window)
    m.save()
    return path


def _builder(path: Path, name: str, windows: Sequence[bool], width: int, kv_heads: int, seed: int = 0) -> GgufBuilder:
    m = GgufBuilder(path, name, layers=len(windows), width=width, seed=seed)
    m.attention(heads=HEADS, kv_heads=kv_heads, head_width=HEAD)
    m.writer.add_feed_forward_length(FFN)
    m.writer.add_sliding_window(WINDOW)
    m.writer.add_array(f"{name}.attention.sliding_window_pattern", list(windows))
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        m.writer.add_uint32(f"{name}.{key}", HEAD_SWA)
    m.writer.add_float32(f"{name}.rope.freq_base_swa", BASE_SWA)
    m.writer.kv_data[0][f"{name}.rope.freq_base"].value = BASE  # that of a builder is 10,000
    factors = np.where(np.arange(HEAD // 2) < HEAD // 8, 1.0, 1e30)  # most numbers are not rotated
    m.writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    return m


def _write_layer(m: GgufBuilder, b: str, width: int, is_window: bool) -> None:
    head = HEAD_SWA if is_window else HEAD
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        _norm(m, f"{b}.{name}", width)
    _norm(m, f"{b}.attn_q_norm", head, gain=0.3)  # there is no other scale of attention
    m.matrix(f"{b}.attn_q", HEADS * head, width)
    m.matrix(f"{b}.attn_output", width, HEADS * head)
    m.matrix(f"{b}.ffn_gate", FFN, width)
    m.matrix(f"{b}.ffn_up", FFN, width)
    m.matrix(f"{b}.ffn_down", width, FFN)
    m.writer.add_tensor(f"{b}.layer_output_scale.weight", np.array([0.7], np.float32))


def _norm(m: GgufBuilder, name: str, n: int, gain: float = 1.0) -> None:
    m.writer.add_tensor(f"{name}.weight", (gain * m.rng.uniform(0.5, 1.5, n)).astype(np.float32))


_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "nextn.pre_projection.weight": "pre_projection.weight",
    "nextn.post_projection.weight": "post_projection.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    **{f"attn_{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in "qk"},
    **{f"attn_{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkv"},
    "attn_output.weight": "self_attn.o_proj.weight",
    **{f"ffn_{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "layer_output_scale.weight": "layer_scalar",
}


def name_tensors(path: Path) -> dict[str, np.ndarray]:
    """Those of a GGUF file by the names of Hugging Face."""
    found = {}
    for name, each in read_tensors(path).items():
        if name.startswith("blk."):
            _, i, rest = name.split(".", 2)
            found[f"model.layers.{i}.{_LAYER[rest]}"] = np.array(each, np.float32)
        elif name != "rope_freqs.weight":
            found[_OUTER[name]] = np.array(each, np.float32)
    return found


def describe_layers(windows: Sequence[bool], width: int) -> dict[str, Any]:
    """A config of gemma4_text."""
    return {
        "model_type": "gemma4_text",
        "hidden_size": width,
        "num_hidden_layers": len(windows),
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SWA,
        "global_head_dim": HEAD,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "rms_norm_eps": 1e-5,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windows],
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
        "vocab_size": 4096,
    }


class Reference:
    """The forward pass over a text, and the assistant's over drafted tokens after it."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self._target, self._head = read_tensors(target), read_tensors(assistant)
        self._windows = [self._is_window(self._head, i) for i in range(len(WINDOWS))]

    def logits(self, text: list[int], drafted: list[int]) -> Any:
        """[V] after `text`, whose last token is the root, and `drafted`."""
        states, kept = self._run_target(text[:-1])
        state, position = states[-1], len(text) - 1
        for token in (text[-1], *drafted):
            embedded = self._target["token_embd.weight"][token] * np.sqrt(WIDTH)
            h = (np.concatenate([embedded, state]) @ self._head["nextn.pre_projection.weight"].T)[None]
            for i, is_window in enumerate(self._windows):
                keys, values = kept[0 if is_window else 1]
                h = _layer(self._head, i, h, np.array([position]), keys, values, np.arange(position), is_window)
            h = normed(h, self._head["output_norm.weight"])[0]
            state = h @ self._head["nextn.post_projection.weight"].T
        return h @ self._head["token_embd.weight"].T

    def _run_target(self, tokens: list[int]) -> tuple[Any, list[tuple[Any, Any]]]:
        """[n, WIDTH] after the final norm, and the keys and values of each layer."""
        h, positions, kept = self._target["token_embd.weight"][tokens] * np.sqrt(WIDTH), np.arange(len(tokens)), []
        for i in range(len(TARGET_WINDOWS)):
            is_window, b = self._is_window(self._target, i), f"blk.{i}."
            x = normed(h, self._target[f"{b}attn_norm.weight"])
            k, v = ((x @ self._target[f"{b}attn_{name}.weight"].T).reshape(len(x), KV_HEADS, -1) for name in ("k", "v"))
            k = _rotate(normed(k, self._target[f"{b}attn_k_norm.weight"]), positions, is_window)
            kept.append((k, normed(v)))
            h = _layer(self._target, i, h, positions, *kept[-1], positions, is_window)
        return normed(h, self._target["output_norm.weight"]), kept

    @staticmethod
    def _is_window(tensors: dict[str, Any], i: int) -> bool:
        return len(tensors[f"blk.{i}.attn_q_norm.weight"]) == HEAD_SWA


def _layer(t: dict[str, Any], i: int, h: Any, at: Any, keys: Any, values: Any, held: Any, is_window: bool) -> Any:
    """A layer over rows `h` at positions `at`, which attend to keys and values at positions `held`."""
    b = f"blk.{i}."
    q = (normed(h, t[f"{b}attn_norm.weight"]) @ t[f"{b}attn_q.weight"].T).reshape(len(h), HEADS, -1)
    q = _rotate(normed(q, t[f"{b}attn_q_norm.weight"]), at, is_window)
    behind = at[:, None] - held[None]
    mask = (behind >= 0) & (behind < (WINDOW if is_window else 2**30))
    out = attend(q * np.sqrt(q.shape[-1]), keys, values, mask).reshape(len(h), -1) @ t[f"{b}attn_output.weight"].T
    h = h + normed(out, t[f"{b}post_attention_norm.weight"])
    x = normed(h, t[f"{b}ffn_norm.weight"])
    z = x @ t[f"{b}ffn_gate.weight"].T
    gelu = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    out = (gelu * (x @ t[f"{b}ffn_up.weight"].T)) @ t[f"{b}ffn_down.weight"].T
    return (h + normed(out, t[f"{b}post_ffw_norm.weight"])) * t[f"{b}layer_output_scale.weight"]


def _rotate(x: Any, positions: Any, is_window: bool) -> Any:
    half = x.shape[-1] // 2
    i = np.arange(half)
    factors = 1.0 if is_window else np.where(i < HEAD // 8, 1.0, 1e30)
    angles = positions[:, None] * ((BASE_SWA if is_window else BASE) ** (-i / half) / factors)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
