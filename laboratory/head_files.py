"""What the converters of trained heads to GGUF files share."""

from __future__ import annotations

from pathlib import Path

import click
import gguf
import numpy as np
from safetensors.numpy import load_file

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by name."""
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


def copy_vocabulary(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    """Copy all keys of the tokenizer; returns the number of tokens."""
    for key, field in source.fields.items():
        if key.startswith("tokenizer."):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, inner)
    n: int = len(source.fields["tokenizer.ggml.tokens"].contents())
    writer.add_vocab_size(n)
    return n


def write_shape(
    writer: gguf.GGUFWriter, *, context: int, width: int, blocks: int, ffn: int, heads: int, kv_heads: int, head: int,
    rotated: int, rope_base: float, epsilon: float,
) -> None:  # fmt: skip
    """Write the keys of a transformer; a head of its attention has `head` numbers, of which the first are rotated."""
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(blocks)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope_base)
    writer.add_layer_norm_rms_eps(epsilon)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
