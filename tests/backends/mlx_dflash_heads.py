"""Random-weight DFlash and DSpark heads as folders, and their forward pass in numpy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.model import MlxModel
from tests.backends.numpy_layers import EPS, ROPE_BASE, attend, feed_forward, normed, rotated

HEADS, KV_HEADS, HEAD_DIM, FFN, RANK = 4, 2, 32, 96, 8


def make_folder(
    path: Path,
    kind: str = "dflash",
    *,
    size: int,
    layers: Sequence[int],
    vocab_size: int,
    n_rows: int = 6,
    tensors: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """A head for a target of hidden size `size` that reads the inputs of `layers`; two layers, a mask of token 3.

    `tensors` and `config` are added to what the files hold; None takes a tensor out.
    """
    rng = np.random.default_rng(12)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        return mx.array(rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(columns)))

    def norm(n: int) -> Any:
        return mx.array(rng.uniform(0.5, 1.5, n).astype(np.float32))

    arrays = {"fc.weight": matrix(size, len(layers) * size), "hidden_norm.weight": norm(size)}
    arrays["norm.weight"] = 6 * norm(size)  # scores with a standard deviation of about 3
    for i in range(2):
        shapes = {"q": (HEADS * HEAD_DIM, size), "k": (KV_HEADS * HEAD_DIM, size), "v": (KV_HEADS * HEAD_DIM, size)}
        layer = {f"self_attn.{name}_proj": matrix(*shape) for name, shape in shapes.items()}
        layer |= {"self_attn.o_proj": matrix(size, HEADS * HEAD_DIM, 2.0), "mlp.gate_proj": matrix(FFN, size)}
        layer |= {"mlp.up_proj": matrix(FFN, size), "mlp.down_proj": matrix(size, FFN)}
        layer |= {f"self_attn.{name}_norm": norm(HEAD_DIM) for name in "qk"}
        layer |= {name: norm(size) for name in ("input_layernorm", "post_attention_layernorm")}
        arrays |= {f"layers.{i}.{name}.weight": each for name, each in layer.items()}
    if kind == "dspark":
        arrays["markov_head.markov_w1.weight"] = matrix(vocab_size, RANK, 3.0)
        arrays["markov_head.markov_w2.weight"] = matrix(vocab_size, RANK, 3.0)
        arrays["confidence_head.proj.weight"] = matrix(1, size + RANK)
        arrays["confidence_head.proj.bias"] = mx.array([0.5])
    arrays |= tensors or {}
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), {k: v for k, v in arrays.items() if v is not None})
    outputs = [layer - 1 for layer in layers]
    settings = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "Qwen3DSparkModel"],
        "hidden_size": size,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_BASE,
        "max_position_embeddings": 2048,
        "vocab_size": vocab_size,
        "block_size": n_rows,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": outputs},
        **(config or {}),
    }
    (path / "config.json").write_text(json.dumps(settings))
    return path


class NumpyHead:
    """The forward pass of one block, in double precision; `windows` and `is_causal` are those of its layers."""

    def __init__(
        self,
        folder: Path,
        target: MlxModel,
        windows: Sequence[int | None] = (None, None),
        is_causal: Sequence[bool] = (False, False),
    ) -> None:
        self.w = {k: np.array(v).astype(np.float64) for k, v in mx.load(str(folder / "model.safetensors")).items()}
        config = json.loads((folder / "config.json").read_text())
        self.shape = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.rows = [3] * config["block_size"]
        self.windows, self.is_causal = windows, is_causal
        embeddings = target.network.model.embed_tokens(mx.arange(target.tokenizer.vocab_size))
        self.embeddings = np.array(embeddings).astype(np.float64)

    def output(self, features: Any, root: int) -> Any:
        """[block, H], normed, of the block with `root` after a text with `features` [n, layers * H]."""
        z = normed(features @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        x = self.embeddings[[root, *self.rows[1:]]]
        for i, (window, is_causal) in enumerate(zip(self.windows, self.is_causal, strict=True)):
            w = {k.removeprefix(f"layers.{i}."): v for k, v in self.w.items()}
            mix_in, mix_out = self._convolutions(w, "attn", y := normed(x, w["input_layernorm.weight"]))
            x = x + mix_out(self._attend(w, z, mix_in(y), window, is_causal))
            mix_in, mix_out = self._convolutions(w, "ffn", y := normed(x, w["post_attention_layernorm.weight"]))
            matrices = (w[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            x = x + mix_out(feed_forward(mix_in(y), *matrices))
        return normed(x, self.w["norm.weight"])

    def _convolutions(self, w: Any, part: str, y: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """What DFlash2 does with the rows before and after a `part` of a layer, whose normed input is `y`."""
        if f"{part}_conv_base" not in w:
            return (lambda rows: rows), (lambda rows: rows)
        base = w[f"{part}_conv_base"]  # [2, taps, H]
        taps, size = base.shape[1:]
        coefficients = (y @ w[f"{part}_conv_proj.weight"].T).reshape(len(y), 2, taps, -1)
        weights = base + np.repeat(coefficients, size // coefficients.shape[-1], axis=-1)  # one for each group

        def mix(side: int, rows: Any) -> Any:
            shifted = (np.concatenate([np.zeros((tap, size)), rows])[: len(rows)] for tap in range(taps))
            return sum(weights[:, side, tap] * each for tap, each in enumerate(shifted))

        return partial(mix, 0), partial(mix, 1)

    def scores(self, output: Any) -> Any:
        return output @ self.w.get("lm_head.weight", self.embeddings).T

    def bias(self, token: int) -> Any:
        """[V] what `token` adds to the scores of a DSpark row that follows it."""
        return self.w["markov_head.markov_w2.weight"] @ self.w["markov_head.markov_w1.weight"][token]

    def _attend(self, w: Any, z: Any, x: Any, window: int | None, is_causal: bool) -> Any:
        heads, kv_heads, width = self.shape
        n, m = len(z), len(x)

        def split(rows: Any, name: str, count: int) -> Any:
            return (rows @ w[f"self_attn.{name}_proj.weight"].T).reshape(len(rows), count, width)

        seen = np.concatenate([z, x])  # hidden states of the text, then the block's own rows
        q = rotated(normed(split(x, "q", heads), w["self_attn.q_norm.weight"]), n)
        k = rotated(normed(split(seen, "k", kv_heads), w["self_attn.k_norm.weight"]), 0)
        at, to = np.arange(n, n + m)[:, None], np.arange(n + m)[None]
        mask = (at - to < (window or n + m + 1)) & ((to <= at) | (not is_causal))
        attended = attend(q, k, split(seen, "v", kv_heads), mask)
        return attended.reshape(m, -1) @ w["self_attn.o_proj.weight"].T
