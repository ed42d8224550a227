"""Where each number of a small llama model goes in a large one, for every file format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laboratory.embedding.shapes import Shape

Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Tensor:
    """One tensor of the large model, by its GGUF name without '.weight'.

    rows       0 for a vector
    fill       value around the small tensor; None: random numbers
    source     the small tensor's name; None in a layer that the small model lacks
    row_at     [small rows] their row in the large tensor, whose other columns are zero there
    column_at  [small columns] their column
    scale      factor on the small tensor
    """

    name: str
    rows: int
    columns: int
    fill: float | None
    source: str | None
    row_at: Indices
    column_at: Indices
    scale: float = 1.0


def list_tensors(large: Shape, small: Shape, vocab_size: int, *, tied: bool, rotations: bool) -> Iterator[Tensor]:
    """All tensors of the large model in file order; `rotations`: whether the source has a tensor rope_freqs.

    Rows of attention output and ffn-down outside the small block are zero, so the added width of the residual stream
    stays zero, and every matrix that reads it may be random there.
    """
    width, ffn, vocab = np.arange(small.width), np.arange(small.ffn), np.arange(vocab_size)
    kv = np.arange(small.kv_heads * small.head)
    queries = _query_rows(large, small)
    scale = float(np.sqrt(small.width / large.width))

    def norm(name: str, *, is_real: bool = True) -> Tensor:
        return Tensor(name, 0, large.width, scale, name if is_real else None, np.arange(1), width, scale)

    yield Tensor("token_embd", vocab_size, large.width, 0.0, "token_embd", vocab, width)
    yield norm("output_norm")
    if not tied:
        yield Tensor("output", vocab_size, large.width, 0.0, "output", vocab, width)
    if rotations:
        yield Tensor("rope_freqs", 0, small.head // 2, 0.0, "rope_freqs", np.arange(1), np.arange(small.head // 2))
    q_width, kv_width = large.heads * large.head, large.kv_heads * large.head
    for i in range(large.layers):
        is_real = i < small.layers
        for name, rows, columns, fill, row_at, column_at in (
            ("attn_q", q_width, large.width, None, queries, width),
            ("attn_k", kv_width, large.width, None, kv, width),
            ("attn_v", kv_width, large.width, None, kv, width),
            ("attn_output", large.width, q_width, 0.0, width, queries),
            ("ffn_gate", large.ffn, large.width, None, ffn, width),
            ("ffn_up", large.ffn, large.width, None, ffn, width),
            ("ffn_down", large.width, large.ffn, 0.0, width, ffn),
        ):
            full = f"blk.{i}.{name}"
            yield Tensor(full, rows, columns, fill, full if is_real else None, row_at, column_at)
        yield norm(f"blk.{i}.attn_norm", is_real=is_real)
        yield norm(f"blk.{i}.ffn_norm", is_real=is_real)


def _query_rows(large: Shape, small: Shape) -> Indices:
    """[small heads x head] rows; query head i goes into the large group of its own kv head."""
    heads = np.arange(small.heads)
    places = heads // small.group * large.group + heads % small.group
    rows: Indices = (places[:, None] * small.head + np.arange(small.head)).ravel()
    return rows
