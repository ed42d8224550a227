"""Random-weight EAGLE-3 heads for the embedded target, as GGUF files, and their forward pass in numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from edgespec.backends.llamacpp.hidden_states import Floats
from edgespec.formats.heads import HeadSpec
from tests.backends.numpy_layers import EPS, ROPE_BASE, attend, feed_forward, normed, read_tensors
from tests.gguf_models import TARGET, GgufBuilder

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, FFN = 256, (2, 3, 5), 4, 2, 32, 192
DRAFT_VOCABULARY = 500


@dataclass(frozen=True)
class Head:
    """`size` other than HIDDEN: with embeddings and an output matrix of its own, for all tokens."""

    path: Path
    size: int
    is_normed: bool  # norm_before_residual and norm_before_fc

    @property
    def spec(self) -> HeadSpec:
        norm = "all" if self.is_normed else "none"
        return HeadSpec("eagle3", HIDDEN, LAYERS, self.size, self.is_normed, norm)


def make_head(path: Path, *, size: int = HIDDEN, is_normed: bool = False, max_id: int | None = None) -> Head:
    """Write the file. `max_id` replaces an id of d2t."""
    m = GgufBuilder(path, "eagle3", layers=1, width=size, seed=11)
    m.attention(heads=HEADS, kv_heads=KV_HEADS, head_width=HEAD_WIDTH)
    m.writer.add_feed_forward_length(FFN)
    m.writer.add_array("eagle3.target_layers", list(LAYERS))
    m.writer.add_uint32("eagle3.target_hidden_size", HIDDEN)
    m.writer.add_bool("eagle3.norm_before_residual", is_normed)
    m.writer.add_bool("eagle3.norm_before_fc", is_normed)

    def norm(name: str, n: int) -> None:
        m.writer.add_tensor(f"{name}.weight", m.rng.uniform(0.5, 1.5, n).astype(np.float32))

    m.matrix("fc", size, len(LAYERS) * HIDDEN)
    if is_normed:
        norm("enc.output_norm", len(LAYERS) * HIDDEN)
    for name in ("blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm", "output_norm"):
        norm(name, size)
    m.matrix("blk.0.attn_q", HEADS * HEAD_WIDTH, 2 * size, gain=1.5)
    m.matrix("blk.0.attn_k", KV_HEADS * HEAD_WIDTH, 2 * size, gain=1.5)
    m.matrix("blk.0.attn_v", KV_HEADS * HEAD_WIDTH, 2 * size)
    m.matrix("blk.0.attn_output", size, HEADS * HEAD_WIDTH, gain=2.0)
    m.matrix("blk.0.ffn_gate", FFN, size)
    m.matrix("blk.0.ffn_up", FFN, size)
    m.matrix("blk.0.ffn_down", size, FFN)
    if size == HIDDEN:
        ids = np.sort(m.rng.permutation(m.vocab_size)[:DRAFT_VOCABULARY]).astype(np.int64)
        ids[-1] = ids[-1] if max_id is None else max_id
        m.writer.add_tensor("d2t", ids)
        m.matrix("output", DRAFT_VOCABULARY, size, gain=3.0)
    else:
        m.matrix("token_embd", m.vocab_size, size)
        m.matrix("output", m.vocab_size, size, gain=3.0)
    m.save()
    return Head(path, size, is_normed)


def make_head_folder(path: Path, *, target_size: int, layers: tuple[int, int, int], vocab_size: int) -> Path:
    """A head of random weights in the SafeAI dialect."""
    rng, size, kv_size = np.random.default_rng(12), target_size, KV_HEADS * HEAD_WIDTH

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Floats:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(columns))

    tensors = {
        "fc.weight": matrix(size, 3 * target_size),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * HEAD_WIDTH, 2 * size, 1.5),
        "midlayer.self_attn.k_proj.weight": matrix(kv_size, 2 * size, 1.5),
        "midlayer.self_attn.v_proj.weight": matrix(kv_size, 2 * size),
        "midlayer.self_attn.o_proj.weight": matrix(size, HEADS * HEAD_WIDTH, 2.0),
        "midlayer.mlp.gate_proj.weight": matrix(FFN, size),
        "midlayer.mlp.up_proj.weight": matrix(FFN, size),
        "midlayer.mlp.down_proj.weight": matrix(size, FFN),
        "lm_head.weight": matrix(vocab_size, size, 3.0),
        **{f"midlayer.{name}.weight": np.ones(size, np.float32) for name in ("hidden_norm", "input_layernorm")},
        **{f"{name}.weight": np.ones(size, np.float32) for name in ("midlayer.post_attention_layernorm", "norm")},
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "intermediate_size": FFN,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_BASE,
        "max_position_embeddings": 2048,
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


class NumpyHead:
    """The forward pass over all pairs of a text at once."""

    def __init__(self, head: Head) -> None:
        self._w = read_tensors(head.path)
        self._head = head
        self._embeddings = self._w.get("token_embd.weight", read_tensors(TARGET)["token_embd.weight"])

    def logits(self, features: Floats, tokens: list[int], drafted: list[int]) -> Floats:
        """[V] after the pairs of `features` [n, 3 H] and `tokens` [n], and of each drafted token and the state before.

        Logits of tokens without a row are -inf.
        """
        fused = features.astype(np.float64)
        if self._head.is_normed:
            fused = normed(fused, self._w["enc.output_norm.weight"])
        fused = fused @ self._w["fc.weight"].T
        states = self._decode(fused, tokens)
        for token in drafted:
            fused, tokens = np.concatenate([fused, states[-1:]]), [*tokens, token]
            states = self._decode(fused, tokens)
        z = (normed(states[-1:], self._w["output_norm.weight"]) @ self._w["output.weight"].T)[0]
        if "d2t" not in self._w:
            return z.astype(np.float32)
        scattered = np.full(len(self._embeddings), -np.inf, np.float32)
        scattered[self._w["d2t"]] = z
        return scattered

    def _decode(self, fused: Floats, tokens: list[int]) -> Floats:
        """[n, size] the states after the layer."""
        w, n = {k.removeprefix("blk.0.").removesuffix(".weight"): v for k, v in self._w.items()}, len(tokens)
        g = normed(fused, w["attn_norm_2"])
        x = np.concatenate([normed(self._embeddings[tokens].astype(np.float64), w["attn_norm"]), g], axis=1)
        q = _rotate((x @ w["attn_q"].T).reshape(n, HEADS, HEAD_WIDTH))
        k = _rotate((x @ w["attn_k"].T).reshape(n, KV_HEADS, HEAD_WIDTH))
        v = (x @ w["attn_v"].T).reshape(n, KV_HEADS, HEAD_WIDTH)
        attended = attend(q, k, v, np.tri(n, dtype=bool)).reshape(n, -1) @ w["attn_output"].T
        hidden = attended + (g if self._head.is_normed else fused)
        y = normed(hidden, w["ffn_norm"])
        return hidden + feed_forward(y, w["ffn_gate"], w["ffn_up"], w["ffn_down"])


def _rotate(x: Floats) -> Floats:
    """Rotary embedding of neighbouring numbers; position is the row."""
    n, _, width = x.shape
    angles = np.arange(n)[:, None] * ROPE_BASE ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
