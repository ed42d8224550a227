"""An EAGLE-3 head in the width of a target that was embedded in a larger shape: its function at a larger cost.

Matrices and embeddings are padded with zeros, norm weights scaled by sqrt(d/D) and their epsilon by d/D, and the heads
of the attention go into their kv groups; see laboratory.cost_faithful.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from laboratory.embedding.shapes import Shape
from laboratory.embedding.sources import Floats

_NORMS = ("embedding_norm", "feature_norm", "ffn_norm", "output_norm")


def widen_head(weights: Mapping[str, Floats], small: Shape, large: Shape) -> dict[str, Floats]:
    """`weights` of a head in neutral names (formats.head_tensors.eagle3_names), in the shape `large`.

    Only for heads whose features have no norm before `fc`. Raises ValueError where a shape does not fit.
    """
    if small.head != large.head or small.group > large.group or small.width > large.width or small.ffn > large.ffn:
        raise ValueError("the head does not fit into the target's shape")
    parts = weights["fc"].shape[1] // small.width
    places = _find_places(small, large)
    axes = {
        "fc": ("width", f"{parts}"),
        **{name: (name, "2") for name in "qkv"},
        "o": ("width", "q"),
        **dict.fromkeys(("gate", "up"), ("ffn", "width")),
        "down": ("width", "ffn"),
        **dict.fromkeys(("output", "embedding"), ("all", "width")),
    }
    wide = {name: _place(weights[name], *axes[name], places) for name in axes if name in weights}
    scale = np.sqrt(small.width / large.width, dtype=np.float32)
    for name in _NORMS:
        wide[name] = np.zeros(large.width, np.float32)
        wide[name][: small.width] = scale * weights[name]
    return wide


def _find_places(small: Shape, large: Shape) -> dict[str, tuple[np.ndarray, int]]:
    """(the rows or columns of the small matrix in the large one, the large number) by kind of axis."""

    def repeat(parts: int) -> tuple[np.ndarray, int]:
        rows = np.arange(parts)[:, None] * large.width + np.arange(small.width)
        return rows.ravel(), parts * large.width

    heads = np.arange(small.heads)
    heads = heads // small.group * large.group + heads % small.group
    queries = (heads[:, None] * large.head + np.arange(large.head)).ravel()
    keys = np.arange(small.kv_heads * small.head), large.kv_heads * large.head
    return {
        **{str(parts): repeat(parts) for parts in range(1, 9)},
        "width": repeat(1),
        "q": (queries, large.heads * large.head),
        "k": keys,
        "v": keys,
        "ffn": (np.arange(small.ffn), large.ffn),
    }


def _place(array: Floats, rows: str, columns: str, places: Mapping[str, tuple[np.ndarray, int]]) -> Floats:
    at = [places.get(kind, (np.arange(n), n)) for kind, n in zip((rows, columns), array.shape, strict=True)]
    wide = np.zeros((at[0][1], at[1][1]), np.float32)
    wide[np.ix_(at[0][0], at[1][0])] = array
    return wide
