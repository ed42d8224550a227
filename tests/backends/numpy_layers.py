"""What the forward passes of heads in numpy share: norms, rotary embedding, attention, feed-forward layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

EPS, ROPE_BASE = 1e-5, 10_000.0


def normed(x: Any, weight: Any = 1.0) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight


def rotated(x: Any, first: int = 0) -> Any:
    """Rotary embedding of the two halves of a head; x [n, heads, width], its first row at position `first`."""
    half = x.shape[-1] // 2
    angles = np.arange(first, first + len(x))[:, None] * ROPE_BASE ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """[n, heads, width] of queries [n, heads, width], keys and values [m, kv_heads, width], `mask` [n, m]."""
    k, v = (each.repeat(q.shape[1] // each.shape[1], axis=1) for each in (k, v))
    scores = np.where(mask, np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v)


def feed_forward(x: Any, gate: Any, up: Any, down: Any) -> Any:
    z = x @ gate.T
    return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T


def read_tensors(path: Path) -> dict[str, Any]:
    """Of a GGUF file, each as floats in the order of a matrix's rows; d2t as ids."""
    return {
        each.name: each.data if each.name == "d2t" else gguf.quants.dequantize(each.data, each.tensor_type)
        for each in gguf.GGUFReader(path).tensors
    }
