"""Embed a small llama model's exact function in a larger llama shape: its tokens at the large model's cost.

    uv run python -m benchmarks.cost_faithful 1b out.gguf [--source small.gguf] [--type Q4_0]

Embeddings are padded with zeros, norm weights scaled by sqrt(d/D) and their epsilon by d/D, the small heads placed
within their kv groups; rows of attention output and ffn-down outside the small block are zero, so that the added width
never reaches the residual stream; everything else is random, and added layers have zero outputs. The result computes
the small model's logits (up to quantization) while it streams every byte and multiplies every block of the large one.
Label figures from such models "cost-faithful": they say nothing of what a real model of that size accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

EMBEDDED = Path(__file__).resolve().parent.parent / "edgespec" / "assets" / "python-6m" / "target.gguf"


@dataclass(frozen=True)
class Shape:
    """Width, layers, heads, kv heads and ffn width of a llama model; the head width follows."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int


# The shapes of Llama 3.2 1B and 3B, 3.1 8B and 3.3 70B, with as many heads as make the head width that of the source
# (64).
SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 8192),
    "3b": Shape(3072, 28, 48, 16, 8192),
    "8b": Shape(4096, 32, 64, 16, 14336),
    "70b": Shape(8192, 80, 128, 16, 28672),
}


class Embedding:
    """Writes one large model around one small one."""

    def __init__(self, source: Path, destination: Path, shape: Shape, quant: gguf.GGMLQuantizationType) -> None:
        self._reader = gguf.GGUFReader(source)
        self._tensors = {t.name: t for t in self._reader.tensors}
        self._shape = shape
        self._quant = quant
        self._block, self._block_bytes = gguf.GGML_QUANT_SIZES[quant]
        self._rng = np.random.default_rng(0)
        self._writer = gguf.GGUFWriter(destination, "llama")
        small = Shape(
            self._field("llama.embedding_length"), self._field("llama.block_count"),
            self._field("llama.attention.head_count"), self._field("llama.attention.head_count_kv"),
            self._field("llama.feed_forward_length"),
        )  # fmt: skip
        self._small = small
        self._head = small.width // small.heads
        group, small_group = shape.heads // shape.kv_heads, small.heads // small.kv_heads
        fits = (
            shape.width // shape.heads == self._head and group >= small_group and shape.kv_heads >= small.kv_heads
            and shape.layers >= small.layers and shape.ffn >= small.ffn and shape.width >= small.width
        )  # fmt: skip
        if not fits:
            raise click.ClickException(f"{small} does not fit into {shape}.")
        # Query head i of the small model goes to this head of the large one, within the group of its own kv head.
        self._places = [(i // small_group) * group + i % small_group for i in range(small.heads)]

    def write(self) -> None:
        self._metadata()
        s, small = self._shape, self._small
        vocab = self._tensors["token_embd.weight"].shape[1]
        embedding = self._zeros(int(vocab), s.width)
        self._put(embedding, self._weights("token_embd"))
        self._matrix("token_embd", embedding)
        self._norm("output_norm", self._weights("output_norm"))
        if "output.weight" in self._tensors:
            output = self._zeros(int(vocab), s.width)
            self._put(output, self._weights("output"))
            self._matrix("output", output)
        for i in range(s.layers):
            self._layer(i, is_real=i < small.layers)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

    def _layer(self, i: int, *, is_real: bool) -> None:
        s, head = self._shape, self._head
        q, k = self._noise(s.width, s.width), self._noise(s.kv_heads * head, s.width)
        v = self._noise(s.kv_heads * head, s.width)
        gate, up = self._noise(s.ffn, s.width), self._noise(s.ffn, s.width)
        out, down = self._zeros(s.width, s.width), self._zeros(s.width, s.ffn)
        if is_real:
            name = f"blk.{i}."
            small_q, small_out = self._weights(name + "attn_q"), self._weights(name + "attn_output")
            for small_head, place in enumerate(self._places):
                rows = slice(small_head * head, (small_head + 1) * head)
                self._put(q, small_q[rows], row=place * head)
                self._put_columns(out, small_out[:, rows], place * head)
            self._put(k, self._weights(name + "attn_k"))
            self._put(v, self._weights(name + "attn_v"))
            self._put(gate, self._weights(name + "ffn_gate"))
            self._put(up, self._weights(name + "ffn_up"))
            self._put_columns(down, self._weights(name + "ffn_down"), 0)
        for norm in ("attn_norm", "ffn_norm"):
            weights = self._weights(f"blk.{i}.{norm}") if is_real else np.ones(self._small.width, np.float32)
            self._norm(f"blk.{i}.{norm}", weights)
        named = {
            "attn_q": q,
            "attn_k": k,
            "attn_v": v,
            "attn_output": out,
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": down,
        }
        for each, data in named.items():
            self._matrix(f"blk.{i}.{each}", data)

    def _metadata(self) -> None:
        w, s = self._writer, self._shape
        w.add_name(f"cost-faithful {s.width}x{s.layers}")
        w.add_context_length(self._field("llama.context_length"))
        w.add_embedding_length(s.width)
        w.add_block_count(s.layers)
        w.add_feed_forward_length(s.ffn)
        w.add_head_count(s.heads)
        w.add_head_count_kv(s.kv_heads)
        w.add_layer_norm_rms_eps(self._field("llama.attention.layer_norm_rms_epsilon") * self._small.width / s.width)
        w.add_rope_dimension_count(self._head)
        w.add_rope_freq_base(self._field("llama.rope.freq_base"))
        w.add_file_type({"Q4_0": 2, "Q8_0": 7, "F16": 1}[self._quant.name])
        copied = {"model": w.add_tokenizer_model, "pre": w.add_tokenizer_pre, "tokens": w.add_token_list,
                  "token_type": w.add_token_types, "merges": w.add_token_merges, "bos_token_id": w.add_bos_token_id,
                  "eos_token_id": w.add_eos_token_id, "add_bos_token": w.add_add_bos_token}  # fmt: skip
        for key, add in copied.items():
            add(self._field(f"tokenizer.ggml.{key}"))
        w.add_vocab_size(len(self._field("tokenizer.ggml.tokens")))
        w.add_chat_template(self._field("tokenizer.chat_template"))

    def _field(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def _weights(self, name: str) -> Floats:
        tensor = self._tensors[f"{name}.weight"]
        values: Floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return values

    def _norm(self, name: str, weights: Floats) -> None:
        padded = np.zeros(self._shape.width, np.float32)
        padded[: len(weights)] = weights * np.sqrt(len(weights) / self._shape.width)
        self._writer.add_tensor(f"{name}.weight", padded)

    def _matrix(self, name: str, data: Bytes) -> None:
        self._writer.add_tensor(f"{name}.weight", data, raw_dtype=self._quant)

    def _quantized(self, values: Floats) -> Bytes:
        data: Bytes = gguf.quants.quantize(np.ascontiguousarray(values), self._quant).view(np.uint8)
        return data

    def _zeros(self, rows: int, columns: int) -> Bytes:
        one = self._quantized(np.zeros((1, columns), np.float32))
        return np.repeat(one, rows, axis=0)

    def _noise(self, rows: int, columns: int) -> Bytes:
        """Random weights; a few hundred distinct rows, since making billions of numbers would take hours."""
        distinct = min(rows, 256)
        values = self._rng.standard_normal((distinct, columns), dtype=np.float32) * np.float32(0.02)
        return self._quantized(values)[self._rng.integers(0, distinct, rows)]

    def _bytes(self, columns: int) -> int:
        return columns // self._block * self._block_bytes

    def _put(self, base: Bytes, values: Floats, row: int = 0) -> None:
        """`values` at the left edge from `row` on, zeros to their right."""
        base[row : row + len(values)] = self._zeros(len(values), self._columns(base))
        base[row : row + len(values), : self._bytes(values.shape[1])] = self._quantized(values)

    def _put_columns(self, base: Bytes, values: Floats, column: int) -> None:
        start = self._bytes(column)
        base[: len(values), start : start + self._bytes(values.shape[1])] = self._quantized(values)

    def _columns(self, base: Bytes) -> int:
        return base.shape[1] // self._block_bytes * self._block


def build(source: Path, destination: Path, shape: str, quant: str) -> None:
    """Write `destination`: the function of `source` at the cost of SHAPES[shape] in `quant`."""
    Embedding(source, destination, SHAPES[shape], gguf.GGMLQuantizationType[quant]).write()


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("destination", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--source", type=click.Path(exists=True, path_type=Path), default=EMBEDDED, help="[default: the embedded target]"
)
@click.option("--type", "quant", type=click.Choice(["Q4_0", "Q8_0", "F16"]), default="Q4_0", show_default=True)
def main(shape: str, destination: Path, source: Path, quant: str) -> None:
    build(source, destination, shape, quant)
    click.echo(f"{destination}: {destination.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
