"""Random-weight Medusa and Hydra heads as folders, and their forward pass in numpy over a whole text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from edgespec.core.arrays import Logits
from tests.backends.numpy_layers import attend, feed_forward, normed, rotated
from tests.formats.head_files import make_pickle, stored, write_torch

Arrays = dict[str, np.ndarray]
HEADS, KV_HEADS = 4, 2


def make_medusa(
    path: Path, *, size: int, vocab_size: int, heads: int = 3, blocks: int = 1, own: Sequence[int] = (0, 1, 2)
) -> Path:
    """Heads of which those in `own` have an output matrix."""
    rng, arrays = np.random.default_rng(5), {}
    for head in range(heads):
        for block in range(blocks):
            arrays[f"{head}.{block}.linear.weight"] = _matrix(rng, size, size)
            arrays[f"{head}.{block}.linear.bias"] = _matrix(rng, 1, size)[0]
        if head in own:
            arrays[f"{head}.{blocks}.weight"] = _matrix(rng, vocab_size, size, 3.0)
    return write_head(path, arrays, {"medusa_num_heads": 2, "medusa_num_layers": blocks})


def make_hydra(
    path: Path, *, size: int, vocab_size: int, heads: int = 3, blocks: int = 2, has_prefix: bool = True
) -> Path:
    """Heads with biases; with a prefix layer those of Hydra++, whose config does not describe it."""
    rng, arrays = np.random.default_rng(6), {}
    step = 1 + has_prefix  # in Hydra++ a layer without weights lies before each block and each output matrix
    for head in range(heads):
        for block in range(blocks):
            width = (2 + head) * size if block == 0 else size
            for name in ("linear", "res_connection")[: 2 if block == 0 else 1]:
                stem = f"hydra_mlp.{head}.{block * step + has_prefix}.{name}"
                arrays[f"{stem}.weight"], arrays[f"{stem}.bias"] = _matrix(rng, size, width), _matrix(rng, 1, size)[0]
        stem = f"hydra_lm_head.{head}{'.1' if has_prefix else ''}"
        arrays[f"{stem}.weight"] = _matrix(rng, vocab_size, size, 3.0)
        arrays[f"{stem}.bias"] = _matrix(rng, 1, vocab_size)[0]
    if has_prefix:
        arrays |= _make_prefix(rng, size)
    return write_head(path, arrays, {"hydra_num_heads": heads, "hydra_num_layers": blocks, "grounded_heads": True})


def write_head(path: Path, arrays: Arrays, config: Mapping[str, Any]) -> Path:
    path.mkdir(parents=True)
    save_file(arrays, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def read_arrays(folder: Path) -> Arrays:
    return {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}


def rewrite(source: Path, path: Path, change: Mapping[str, np.ndarray | None]) -> Path:
    """A copy of a head with other arrays, or without those that are None."""
    arrays = {**load_file(source / "model.safetensors"), **change}
    config = json.loads((source / "config.json").read_text())
    return write_head(path, {name: array for name, array in arrays.items() if array is not None}, config)


def pickle_head(source: Path, path: Path, file: str) -> Path:
    """A copy of a head whose weights lie in a file as torch.save writes it."""
    path.mkdir()
    (path / "config.json").write_text((source / "config.json").read_text())
    state, data = {}, {}
    for number, (name, array) in enumerate(load_file(source / "model.safetensors").items()):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        kind = {"float32": "FloatStorage", "float16": "HalfStorage"}[array.dtype.name]
        state[name] = stored(kind, str(number), array.size, array.shape, strides)
        data[str(number)] = array.tobytes()
    write_torch(path / file, make_pickle(state), data)
    return path


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def run_medusa(arrays: Arrays, output: np.ndarray, state: np.ndarray) -> list[Logits]:
    """[V] of each head for a state [H]; `output` [V, H] is the target's matrix."""
    rows: list[Logits] = []
    while f"{len(rows)}.0.linear.weight" in arrays:
        y, block = state, 0
        while f"{(stem := f'{len(rows)}.{block}')}.linear.weight" in arrays:
            y, block = y + silu(arrays[f"{stem}.linear.weight"] @ y + arrays[f"{stem}.linear.bias"]), block + 1
        rows.append((arrays.get(f"{len(rows)}.{block}.weight", output) @ y).astype(np.float32))
    return rows


def run_hydra(arrays: Arrays, embeddings: np.ndarray, states: np.ndarray, tokens: Sequence[int]) -> Logits:
    """[V] of the head that reads `tokens`, the root and those drafted after it; `states` [n, H] are all before it."""
    head = len(tokens) - 1
    z = (run_prefix(arrays, states) if "prefix_embeding_layer.norm.weight" in arrays else states)[-1]
    x = np.concatenate([z, *embeddings[list(tokens)]])
    blocks = sorted({name.split(".")[2] for name in arrays if name.startswith(f"hydra_mlp.{head}.")}, key=int)
    for number, block in enumerate(blocks):
        stem = f"hydra_mlp.{head}.{block}"
        kept = x
        if number == 0:
            kept = arrays[f"{stem}.res_connection.weight"] @ x + arrays[f"{stem}.res_connection.bias"]
        x = kept + silu(arrays[f"{stem}.linear.weight"] @ x + arrays[f"{stem}.linear.bias"])
    stem = next(name for name in arrays if name.startswith(f"hydra_lm_head.{head}.")).rsplit(".", 1)[0]
    logits: Logits = (arrays[f"{stem}.weight"] @ x + arrays.get(f"{stem}.bias", 0)).astype(np.float32)
    return logits


def run_prefix(arrays: Arrays, states: np.ndarray) -> np.ndarray:
    """[n, H] of the layer of Hydra++ and the norm behind it."""
    w = {name.removeprefix("prefix_embeding_layer.layers.0."): array for name, array in arrays.items()}
    n = len(states)
    x = normed(states, w["input_layernorm.weight"])
    q, k, v = (
        (x @ w[f"self_attn.{c}_proj.weight"].T).reshape(n, heads, -1)
        for c, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    mask = np.tri(n, dtype=bool)
    h = states + attend(rotated(q), rotated(k), v, mask).reshape(n, -1) @ w["self_attn.o_proj.weight"].T
    y = normed(h, w["post_attention_layernorm.weight"])
    h = h + feed_forward(y, *(w[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))
    found: np.ndarray = normed(h, arrays["prefix_embeding_layer.norm.weight"])
    return found


def _make_prefix(rng: np.random.Generator, size: int) -> Arrays:
    layer, kv_size, inner = "prefix_embeding_layer.layers.0.", size // HEADS * KV_HEADS, 2 * size
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    return {
        f"{layer}self_attn.q_proj.weight": _matrix(rng, size, size, 1.5),
        f"{layer}self_attn.k_proj.weight": _matrix(rng, kv_size, size, 1.5),
        f"{layer}self_attn.v_proj.weight": _matrix(rng, kv_size, size),
        f"{layer}self_attn.o_proj.weight": _matrix(rng, size, size, 2.0),
        f"{layer}mlp.gate_proj.weight": _matrix(rng, inner, size),
        f"{layer}mlp.up_proj.weight": _matrix(rng, inner, size),
        f"{layer}mlp.down_proj.weight": _matrix(rng, size, inner),
        **{f"prefix_embeding_layer.{name}.weight": rng.uniform(0.5, 1.5, size).astype(np.float32) for name in norms},
    }


def _matrix(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
    return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(columns))
