"""Random-weight EAGLE-1/2 and MTP heads in folders, and their forward pass in numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file

from edgespec.backends.llamacpp.hidden_states import Floats
from edgespec.core.arrays import Logits
from tests.backends.numpy_layers import EPS, ROPE_BASE, attend, feed_forward, normed, rotated

HEADS, KV_HEADS, HEAD_WIDTH, FFN = 4, 2, 32, 192
_GROUP = 32  # weights that share a scale


@dataclass(frozen=True)
class Look:
    """What a head has beyond llama's layer, and how its file is written.

    shift        of the norms' weights in the file
    n_experts    of which two see a token, and one sees all
    is_deepseek  whether its names are DeepSeek's, as layer 6
    """

    is_gated: bool = False
    is_normed: bool = False
    is_biased: bool = False
    rotated: float = 1.0
    shift: float = 0.0
    is_deepseek: bool = False
    n_layers: int = 1
    n_experts: int = 0


LLAMA = Look()
QWEN = Look(is_gated=True, is_normed=True, rotated=0.5, shift=-1.0)
MIXTURE = replace(QWEN, n_experts=5)


def make_tensors(kind: str, size: int, look: Look, seed: int = 12) -> dict[str, Floats]:
    """By the names of a Hugging Face folder of this kind, 'eagle' or 'mtp'."""
    rng, keys, queries = np.random.default_rng(seed), KV_HEADS * HEAD_WIDTH, HEADS * HEAD_WIDTH

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Floats:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(columns))

    def norm(n: int, low: float = 0.6, high: float = 1.4) -> Floats:
        return rng.uniform(low, high, n).astype(np.float32) + np.float32(look.shift)

    def layer(prefix: str) -> dict[str, Floats]:
        found = {
            "self_attn.q_proj.weight": matrix((1 + look.is_gated) * queries, size, 1.5),
            "self_attn.k_proj.weight": matrix(keys, size, 1.5),
            "self_attn.v_proj.weight": matrix(keys, size),
            "self_attn.o_proj.weight": matrix(size, queries, 2.0),
            "post_attention_layernorm.weight": norm(size),
            "input_layernorm.weight": norm(size),
        }
        mlps = ["mlp."]
        if look.n_experts:
            mlps = ["mlp.shared_expert.", *(f"mlp.experts.{i}." for i in range(look.n_experts))]
            found["mlp.gate.weight"] = matrix(look.n_experts, size, 2.0)
            found["mlp.shared_expert_gate.weight"] = matrix(1, size)
        for mlp in mlps:
            found |= {f"{mlp}{part}_proj.weight": matrix(FFN, size) for part in ("gate", "up")}
            found[f"{mlp}down_proj.weight"] = matrix(size, FFN)
        if look.is_biased:
            found |= {
                f"self_attn.{c}_proj.bias": matrix(len(found[f"self_attn.{c}_proj.weight"]), 1)[:, 0] for c in "qkv"
            }
        if look.is_normed:
            found |= {f"self_attn.{c}_norm.weight": norm(HEAD_WIDTH) for c in "qk"}
        return {prefix + name: each for name, each in found.items()}

    if kind == "eagle":
        w = {"fc.weight": matrix(size, 2 * size)}
        for i in range(look.n_layers):
            w |= layer(f"layers.{i}.")
        del w["layers.0.input_layernorm.weight"]
        return w | ({"fc.bias": matrix(size, 1)[:, 0]} if look.is_biased else {})
    outer, names = "mtp.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    if look.is_deepseek:
        outer, names = "model.layers.6.", ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    arrays = matrix(size, 2 * size), norm(size, 0.1, 0.4), norm(size, 0.3, 0.7), norm(size)
    w = {f"{outer}{name}.weight": each for name, each in zip(names, arrays, strict=True)}
    return w | layer(outer if look.is_deepseek else "mtp.layers.0.")


def make_config(kind: str, size: int, vocab_size: int, look: Look = LLAMA) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLMEagle" if kind == "eagle" else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "num_hidden_layers": look.n_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "intermediate_size": FFN,
        "num_experts_per_tok": 2,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 2048,
        "vocab_size": vocab_size,
    }
    if look.rotated == 1.0:
        return config | {"rope_theta": ROPE_BASE}
    return config | {"rope_parameters": {"rope_theta": ROPE_BASE, "partial_rotary_factor": look.rotated}}


def write_folder(path: Path, tensors: Mapping[str, Floats], config: Mapping[str, Any]) -> Path:
    path.mkdir()
    save_file(dict(tensors), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_pair_folder(path: Path, kind: str, *, size: int, vocab_size: int, look: Look = LLAMA) -> Path:
    """A head of random weights."""
    return write_folder(path, make_tensors(kind, size, look), make_config(kind, size, vocab_size, look))


def stack_experts(tensors: Mapping[str, Floats], *, is_fused: bool) -> dict[str, Floats]:
    """The tensors with the matrices of all experts in one: as in later files of Qwen, or as in mlx-lm's."""
    found = {name: each for name, each in tensors.items() if ".experts." not in name}
    prefix = "mtp.layers.0.mlp."
    gate, up, down = (
        np.stack([each for name, each in tensors.items() if ".experts." in name and f"{part}_proj" in name])
        for part in ("gate", "up", "down")
    )
    if is_fused:
        both = np.concatenate([gate, up], axis=1)
        return found | {f"{prefix}experts.gate_up_proj": both, f"{prefix}experts.down_proj": down}
    parts = {"gate": gate, "up": up, "down": down}
    return found | {f"{prefix}switch_mlp.{part}_proj.weight": each for part, each in parts.items()}


def quantize(path: Path, source: Path, bits: int) -> dict[str, Floats]:
    """Write a copy of a folder with matrices of fewer bits, as mlx-lm does; returns their values."""
    arrays: dict[str, Any] = {}
    values: dict[str, Floats] = {}
    for name, each in mx.load(str(source / "model.safetensors")).items():
        if each.ndim >= 2:
            packed = mx.quantize(each, _GROUP, bits)
            stem = name.removesuffix("weight")
            arrays |= {stem + part: x for part, x in zip(("weight", "scales", "biases"), packed, strict=True)}
            each = mx.dequantize(*packed, _GROUP, bits)
        else:
            arrays[name] = each
        values[name] = np.array(each)
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": _GROUP, "bits": bits}}))
    return values


class NumpyHead:
    """The forward pass over all pairs of a text at once, in double precision."""

    def __init__(self, tensors: Mapping[str, Any], look: Look, embeddings: Floats, output: Floats) -> None:
        names = (
            "model.layers.6.eh_proj",
            "model.layers.6.enorm",
            "model.layers.6.hnorm",
            "model.layers.6.shared_head.norm",
        )
        plain = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        renamed = {f"{a}.weight": f"{b}.weight" for a, b in zip(names, plain, strict=True)}
        self.w = {
            renamed.get(name, name.replace("model.layers.6.", "layers.0.")).removeprefix("mtp."): np.float64(each)
            for name, each in tensors.items()
        }
        for name, each in self.w.items():
            if "norm" in name:
                self.w[name] = each - look.shift
        self.look, self.embeddings, self.output = look, embeddings, output
        self.is_mtp = "pre_fc_norm_hidden.weight" in self.w

    def logits(self, features: Floats, tokens: list[int], drafted: list[int]) -> Logits:
        """[V] after pairs of `features` and `tokens`, and of drafted tokens with the head's own states."""
        states = np.float64(features)
        for token in [*drafted, None]:
            found = self._run(states, tokens)[-1:]
            if token is not None:
                states, tokens = np.concatenate([states, found]), [*tokens, token]
        return (found[0] @ self.output.T).astype(np.float32)

    def _run(self, states: Floats, tokens: list[int]) -> Floats:
        w, embedded = self.w, self.embeddings[tokens]
        if self.is_mtp:
            embedded = normed(embedded, w["pre_fc_norm_embedding.weight"])
            states = normed(states, w["pre_fc_norm_hidden.weight"])
        h = np.concatenate([embedded, states], axis=1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        for i in range(self.look.n_layers):
            h = self._layer(h, f"layers.{i}.")
        return normed(h, w["norm.weight"]) if self.is_mtp else h

    def _layer(self, h: Floats, prefix: str) -> Floats:
        w = {name.removeprefix(prefix): each for name, each in self.w.items() if name.startswith(prefix)}
        n, x = len(h), normed(h, w["input_layernorm.weight"]) if "input_layernorm.weight" in w else h
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        q, k, v = (
            (x @ w[f"self_attn.{c}_proj.weight"].T + w.get(f"self_attn.{c}_proj.bias", 0.0)).reshape(n, heads[c], -1)
            for c in "qkv"
        )
        q, gate = q[..., :HEAD_WIDTH], q[..., HEAD_WIDTH:]
        if self.look.is_normed:
            q, k = normed(q, w["self_attn.q_norm.weight"]), normed(k, w["self_attn.k_norm.weight"])
        q, k = self._rotate(q), self._rotate(k)
        attended = attend(q, k, v, np.tri(n, dtype=bool))
        if self.look.is_gated:
            attended = attended / (1 + np.exp(-gate))
        h = h + attended.reshape(n, -1) @ w["self_attn.o_proj.weight"].T
        y = normed(h, w["post_attention_layernorm.weight"])
        return h + (_mix(w, y) if self.look.n_experts else _mlp(w, "mlp.", y))

    def _rotate(self, x: Floats) -> Floats:
        """Rotary embedding of the two halves of a head's first numbers; position is the row."""
        width = int(HEAD_WIDTH * self.look.rotated)
        return np.concatenate([rotated(x[..., :width]), x[..., width:]], axis=-1)


def _mlp(w: Mapping[str, Floats], prefix: str, y: Floats) -> Floats:
    return feed_forward(y, *(w[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down")))


def _mix(w: Mapping[str, Floats], y: Floats) -> Floats:
    """Each row by the two experts that the router prefers, and by the shared one."""
    gate = 1 / (1 + np.exp(-y @ w["mlp.shared_expert_gate.weight"].T))
    found = gate * _mlp(w, "mlp.shared_expert.", y)
    for row, scores in enumerate(np.exp(y @ w["mlp.gate.weight"].T)):
        best = np.argsort(-scores)[:2]
        for expert in best:
            share = scores[expert] / scores[best].sum()
            found[row] += share * _mlp(w, f"mlp.experts.{expert}.", y[row : row + 1])[0]
    return found
