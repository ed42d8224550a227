"""Random-weight models with an MTP layer, as GGUF files, and that layer's forward pass in numpy."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from edgespec.backends.llamacpp.hidden_states import Floats
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from tests.backends.numpy_layers import attend, feed_forward, normed, read_tensors, rotated
from tests.gguf_models import GgufBuilder, hybrid

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, FFN, EXPERT = 128, 2, 4, 2, 32, 192, 64


def spec_of(path: Path) -> HeadSpec:
    spec = read_head(path)
    assert spec is not None and spec.kind == "mtp"
    return spec


class QuantizedBuilder(GgufBuilder):
    """Matrices are stored in Q8_0."""

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights = self.rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(columns))
        kind = gguf.GGMLQuantizationType.Q8_0
        self.writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, kind), raw_dtype=kind)


def make_mixture(
    path: Path,
    *,
    width: int = WIDTH,
    chained: int = 1,
    is_alone: bool = False,
    is_quantized: bool = False,
    left_out: tuple[str, ...] = (),
    seed: int = 21,
) -> Path:
    """A glm4moe whose layers are dense and whose MTP layer has one routed expert and one shared one.

    `is_alone`: without the layers of the target, for which `seed` must be the same. `left_out` are tensors of the MTP
    layer.
    """
    m = (QuantizedBuilder if is_quantized else GgufBuilder)(path, "glm4moe", layers=LAYERS + chained, width=width)
    m.attention(heads=HEADS, kv_heads=KV_HEADS, head_width=HEAD_WIDTH)
    m.writer.add_feed_forward_length(FFN)
    m.writer.add_leading_dense_block_count(LAYERS)
    m.writer.add_expert_count(1)
    m.writer.add_expert_used_count(1)
    m.writer.add_expert_shared_count(1)
    m.writer.add_expert_feed_forward_length(EXPERT)
    m.writer.add_nextn_predict_layers(chained)
    m.embeddings(width)
    for i in range(0 if is_alone else LAYERS):
        m.rng = np.random.default_rng(seed + i)
        _write_attention(m, f"blk.{i}", width)
        _write_ffn(m, f"blk.{i}.ffn_{{}}", width, FFN)
    for i in range(LAYERS, LAYERS + chained):
        m.rng = np.random.default_rng(seed + i)
        _write_mtp_layer(m, f"blk.{i}", width, left_out)
    m.save()
    return path


def make_dense(path: Path, chained: int = 1) -> Path:
    """A hy_v3 without experts, whose queries and keys are normed."""
    m = GgufBuilder(path, "hy_v3", layers=LAYERS + chained, width=WIDTH)
    m.attention(heads=HEADS, kv_heads=KV_HEADS, head_width=HEAD_WIDTH)
    m.writer.add_feed_forward_length(FFN)
    m.writer.add_expert_feed_forward_length(EXPERT)
    m.writer.add_nextn_predict_layers(chained)
    m.embeddings(WIDTH)
    for i in range(LAYERS + chained):
        b = f"blk.{i}"
        _write_attention(m, b, WIDTH, second_norm="ffn_norm")
        for name in ("attn_q_norm", "attn_k_norm"):
            _write_norm(m, f"{b}.{name}", HEAD_WIDTH)
        _write_ffn(m, f"{b}.ffn_{{}}", WIDTH, FFN)
        if i >= LAYERS:
            _write_fusion(m, b, WIDTH)
    m.save()
    return path


def make_chain(path: Path) -> Path:
    """Three MTP layers, one for each drafted token."""
    return make_dense(path, chained=3)


def make_hybrid(path: Path) -> Path:
    """The qwen35 of tests.gguf_models with an MTP layer."""
    hybrid(path.with_suffix(".base"))
    source = gguf.GGUFReader(path.with_suffix(".base"))
    m = GgufBuilder(path, "qwen35", layers=5, width=128, seed=22)
    for key, field in source.fields.items():
        if key not in m.writer.kv_data[0] and not key.startswith(("GGUF.", "tokenizer.")):
            m.writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    m.writer.add_nextn_predict_layers(1)
    for tensor in source.tensors:
        m.writer.add_tensor(tensor.name, tensor.data)
    width, heads, ffn, b = 128, 2, 128, "blk.4"
    for name, n in {"attn_norm": width, "post_attention_norm": width, "attn_q_norm": 64, "attn_k_norm": 64}.items():
        _write_norm(m, f"{b}.{name}", n)
    m.matrix(f"{b}.attn_q", 2 * width, width, gain=1.5)  # and the gates
    m.matrix(f"{b}.attn_k", width // heads, width, gain=1.5)
    m.matrix(f"{b}.attn_v", width // heads, width)
    m.matrix(f"{b}.attn_output", width, width, gain=2.0)
    _write_ffn(m, f"{b}.ffn_{{}}", width, ffn)
    _write_fusion(m, b, width)
    m.save()
    return path


def _write_attention(m: GgufBuilder, b: str, width: int, second_norm: str = "post_attention_norm") -> None:
    for name in ("attn_norm", second_norm):
        _write_norm(m, f"{b}.{name}", width)
    m.matrix(f"{b}.attn_q", HEADS * HEAD_WIDTH, width, gain=1.5)
    m.matrix(f"{b}.attn_k", KV_HEADS * HEAD_WIDTH, width, gain=1.5)
    m.matrix(f"{b}.attn_v", KV_HEADS * HEAD_WIDTH, width)
    m.matrix(f"{b}.attn_output", width, HEADS * HEAD_WIDTH, gain=2.0)


def _write_ffn(m: GgufBuilder, name: str, width: int, size: int) -> None:
    m.matrix(name.format("gate"), size, width)
    m.matrix(name.format("up"), size, width)
    m.matrix(name.format("down"), width, size)


def _write_mtp_layer(m: GgufBuilder, b: str, width: int, left_out: tuple[str, ...]) -> None:
    _write_attention(m, b, width)
    _write_ffn(m, f"{b}.ffn_{{}}_shexp", width, EXPERT)
    for name, rows, columns in (("gate", EXPERT, width), ("up", EXPERT, width), ("down", width, EXPERT)):
        weights = m.rng.standard_normal((1, rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))
        m.writer.add_tensor(f"{b}.ffn_{name}_exps.weight", weights)
    m.writer.add_tensor(f"{b}.exp_probs_b.bias", np.zeros(1, np.float32))
    if "ffn_gate_inp" not in left_out:
        m.writer.add_tensor(f"{b}.ffn_gate_inp.weight", m.rng.standard_normal((1, width), dtype=np.float32))
    _write_fusion(m, b, width, left_out)


def _write_fusion(m: GgufBuilder, b: str, width: int, left_out: tuple[str, ...] = ()) -> None:
    for name in ("enorm", "hnorm", "shared_head_norm"):
        if name not in left_out:
            _write_norm(m, f"{b}.nextn.{name}", width)
    m.matrix(f"{b}.nextn.eh_proj", width, 2 * width)


def _write_norm(m: GgufBuilder, name: str, n: int) -> None:
    m.writer.add_tensor(f"{name}.weight", m.rng.uniform(0.5, 1.5, n).astype(np.float32))


class NumpyLayer:
    """The forward pass of an MTP layer of `make_mixture` or `make_dense` over all pairs of a text at once."""

    def __init__(self, path: Path, number: int = 0) -> None:
        tensors = {name.removesuffix(".weight"): each for name, each in read_tensors(path).items()}
        self._embeddings, self._output = tensors["token_embd"], tensors["output"]
        block = f"blk.{LAYERS + number}."
        self._w = {name.removeprefix(block): w for name, w in tensors.items() if name.startswith(block)}

    def logits(self, states: Floats, tokens: list[int], drafted: list[int]) -> Floats:
        """[V] after the pairs of the target's `states` [n, H] and `tokens` [n], and of each drafted token."""
        h = states.astype(np.float64)
        own = self.run(h, tokens)
        for token in drafted:
            h, tokens = np.concatenate([h, own[-1:]]), [*tokens, token]
            own = self.run(h, tokens)
        return self.output(own[-1])

    def output(self, state: Floats) -> Floats:
        """[V] of a state [H] after the last norm, the target's or the layer's."""
        return (state @ self._output.T).astype(np.float32)

    def run(self, h: Floats, tokens: list[int]) -> Floats:
        """[n, H] the states of the layer, after its last norm."""
        w, n = self._w, len(tokens)
        embedded = normed(self._embeddings[tokens].astype(np.float64), w["nextn.enorm"])
        x = np.concatenate([embedded, normed(h, w["nextn.hnorm"])], axis=1) @ w["nextn.eh_proj"].T
        y = normed(x, w["attn_norm"])
        q, k = (y @ w["attn_q"].T).reshape(n, HEADS, HEAD_WIDTH), (y @ w["attn_k"].T).reshape(n, KV_HEADS, HEAD_WIDTH)
        if "attn_q_norm" in w:
            q, k = normed(q, w["attn_q_norm"]), normed(k, w["attn_k_norm"])
        q, k = rotated(q), rotated(k)
        v = (y @ w["attn_v"].T).reshape(n, KV_HEADS, HEAD_WIDTH)
        x = x + attend(q, k, v, np.tri(n, dtype=bool)).reshape(n, -1) @ w["attn_output"].T
        return normed(x + self._mix(x), w["nextn.shared_head_norm"])

    def _mix(self, x: Floats) -> Floats:
        w = self._w
        if "ffn_gate" in w:
            return feed_forward(normed(x, w["ffn_norm"]), *(w[f"ffn_{name}"] for name in ("gate", "up", "down")))
        y = normed(x, w["post_attention_norm"])
        routed = feed_forward(y, *(w[f"ffn_{name}_exps"][0] for name in ("gate", "up", "down")))
        shared = feed_forward(y, *(w[f"ffn_{name}_shexp"] for name in ("gate", "up", "down")))
        return routed / (1 + np.exp(-y @ w["ffn_gate_inp"].T)) + shared
