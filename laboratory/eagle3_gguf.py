"""Convert an EAGLE-3 head in a folder (config.json, safetensors) to the GGUF file that llama.cpp reads.

    uv run python -m laboratory.eagle3_gguf FOLDER TARGET.gguf HEAD.gguf [--type Q8_0]

The vocabulary is copied from the target's file. Matrices are stored in F16 or Q8_0, norms in F32. For a target that
laboratory.cost_faithful has made wider than the head's own, the head is made as wide: it computes the same function.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import gguf
import numpy as np
from safetensors.numpy import load_file

from edgespec.formats.head_tensors import eagle3_names, read_draft_ids
from edgespec.formats.heads import read_config_head, usual_layers
from laboratory.embedding.eagle3 import widen_head
from laboratory.embedding.shapes import Shape

_GGUF_NAMES = {
    "fc": "fc",
    "embedding_norm": "blk.0.attn_norm",
    "feature_norm": "blk.0.attn_norm_2",
    "q": "blk.0.attn_q",
    "k": "blk.0.attn_k",
    "v": "blk.0.attn_v",
    "o": "blk.0.attn_output",
    "ffn_norm": "blk.0.ffn_norm",
    "gate": "blk.0.ffn_gate",
    "up": "blk.0.ffn_up",
    "down": "blk.0.ffn_down",
    "output_norm": "output_norm",
    "output": "output",
    "embedding": "token_embd",
    "input_norm": "enc.output_norm",
}


def convert(folder: Path, target: Path, destination: Path, quant: str = "F16") -> None:
    """Raises InvalidModelFile for a folder without such a head, ValueError for one that llama.cpp cannot run."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}
    spec = read_config_head(config, {name: array.shape for name, array in weights.items()})
    if spec is None or spec.kind != "eagle3" or spec.norm_before_fc == "each" or spec.feeds_normed:
        raise ValueError("llama.cpp runs EAGLE-3 heads without norms of single features, and no others")
    names = eagle3_names(weights)
    source = gguf.GGUFReader(target)
    writer = gguf.GGUFWriter(destination, "eagle3")
    n_heads, n_kv = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    width = config.get("head_dim") or spec.size // n_heads
    small = Shape(spec.size, 1, n_heads, n_kv, config["intermediate_size"], width)
    large = _read_target(source, small)
    _write_shape(writer, config, small, large)
    layers = spec.layers or usual_layers(source.fields[f"{_architecture(source)}.block_count"].contents())
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", large.width if large != small else spec.hidden_size)
    writer.add_bool("eagle3.norm_before_residual", spec.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", spec.norm_before_fc == "all")
    vocab_size = copy_vocabulary(source, writer)
    tensors = {neutral: weights[names[neutral]].astype(np.float32) for neutral in _GGUF_NAMES if neutral in names}
    for neutral, n in (("q", n_heads), ("k", n_kv)):
        tensors[neutral] = _interleave(tensors[neutral], n)
    for neutral, array in (widen_head(tensors, small, large) if large != small else tensors).items():
        kind = gguf.GGMLQuantizationType[quant if array.ndim == 2 else "F32"]
        name = f"{_GGUF_NAMES[neutral]}.weight"
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    if "d2t" in names:
        ids, _ = read_draft_ids(weights[names["d2t"]], vocab_size)
        writer.add_tensor("d2t", ids.astype(np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_target(source: gguf.GGUFReader, small: Shape) -> Shape:
    """The head's shape in the target's width; `small` where that is the head's own."""

    def read(key: str) -> int:
        return int(source.fields[f"{_architecture(source)}.{key}"].contents())

    if read("embedding_length") <= small.width:
        return small
    heads = read("attention.head_count"), read("attention.head_count_kv")
    return Shape(read("embedding_length"), 1, *heads, read("feed_forward_length"), small.head)


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, int], small: Shape, large: Shape) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(large.width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(large.ffn)
    writer.add_head_count(large.heads)
    writer.add_head_count_kv(large.kv_heads)
    writer.add_key_length(large.head)
    writer.add_value_length(large.head)
    writer.add_rope_dimension_count(large.head)
    writer.add_rope_freq_base(float(config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]) * small.width / large.width)


def _architecture(source: gguf.GGUFReader) -> str:
    return str(source.fields["general.architecture"].contents())


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


def _interleave(array: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order: rotated pairs are neighbours instead of half a head apart."""
    rows, columns = array.shape
    return array.reshape(n_heads, 2, rows // n_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--type", "quant", type=click.Choice(["F16", "Q8_0"]), default="F16", show_default=True)
def main(folder: Path, target: Path, destination: Path, quant: str) -> None:
    """Convert the head in FOLDER for the model TARGET; prints the size of the file as JSON."""
    convert(folder, target, destination, quant)
    click.echo(json.dumps({"benchmark": "eagle3_gguf", "bytes": destination.stat().st_size}))


if __name__ == "__main__":
    main()
