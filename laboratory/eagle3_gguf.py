"""Convert an EAGLE-3 head in a folder (config.json, safetensors) to the GGUF file that llama.cpp reads.

    uv run python -m laboratory.eagle3_gguf FOLDER TARGET.gguf HEAD.gguf [--type Q8_0]

The vocabulary is copied from the target's file. Matrices are stored in F16 or Q8_0, norms in F32. For a target that
laboratory.cost_faithful has made wider than the head's own, the head is made as wide: it computes the same function.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click
import gguf
import numpy as np

from edgespec.formats.head_config import read_config_head
from edgespec.formats.head_tensors import eagle3_names, read_draft_ids
from edgespec.train.head_arrays import GGUF_NAMES
from edgespec.train.head_files import copy_vocabulary, interleave, write_shape
from edgespec.train.student import finish_gguf
from laboratory.embedding.shapes import Shape
from laboratory.embedding.sources import Floats
from laboratory.head_files import FILE, FOLDER, read_weights


def convert(folder: Path, target: Path, destination: Path, quant: str = "F16") -> None:
    """Raises InvalidModelFile for a folder without such a head, ValueError for one that llama.cpp cannot run."""
    config = json.loads((folder / "config.json").read_text())
    weights = read_weights(folder)
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
    write_shape(
        writer, context=config["max_position_embeddings"], width=large.width, blocks=1, ffn=large.ffn,
        heads=large.heads, kv_heads=large.kv_heads, head=large.head, rotated=large.head,
        rope_base=float(config.get("rope_theta", 10000.0)),
        epsilon=float(config["rms_norm_eps"]) * small.width / large.width,
    )  # fmt: skip
    layers = spec.complete(source.fields[f"{_architecture(source)}.block_count"].contents()).layers
    writer.add_array("eagle3.target_layers", list(layers or ()))
    writer.add_uint32("eagle3.target_hidden_size", large.width if large != small else spec.hidden_size)
    writer.add_bool("eagle3.norm_before_residual", spec.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", spec.norm_before_fc == "all")
    vocab_size = copy_vocabulary(source, writer)
    tensors = {
        neutral: weights[names[neutral]].astype(np.float32)
        for neutral in names
        if neutral in GGUF_NAMES and neutral != "d2t"
    }
    for neutral, n in (("q", n_heads), ("k", n_kv)):
        tensors[neutral] = interleave(tensors[neutral], n)
    for neutral, array in (widen_head(tensors, small, large) if large != small else tensors).items():
        kind = gguf.GGMLQuantizationType[quant if array.ndim == 2 else "F32"]
        writer.add_tensor(GGUF_NAMES[neutral], gguf.quants.quantize(array, kind), raw_dtype=kind)
    if "d2t" in names:
        ids = read_draft_ids(weights[names["d2t"]], vocab_size)
        writer.add_tensor("d2t", ids.astype(np.int64))
    finish_gguf(writer)


def _read_target(source: gguf.GGUFReader, small: Shape) -> Shape:
    """The head's shape in the target's width; `small` where that is the head's own."""

    def read(key: str) -> int:
        return int(source.fields[f"{_architecture(source)}.{key}"].contents())

    if read("embedding_length") <= small.width:
        return small
    heads = read("attention.head_count"), read("attention.head_count_kv")
    return Shape(read("embedding_length"), 1, *heads, read("feed_forward_length"), small.head)


def _architecture(source: gguf.GGUFReader) -> str:
    return str(source.fields["general.architecture"].contents())


_NORMS = ("embedding_norm", "feature_norm", "ffn_norm", "output_norm")


def widen_head(weights: Mapping[str, Floats], small: Shape, large: Shape) -> dict[str, Floats]:
    """`weights` of a head in neutral names (formats.head_tensors.eagle3_names), in the shape `large`.

    Only for heads whose features have no norm before `fc`. Raises ValueError where a shape does not fit.

    The head computes the same at a larger cost. Matrices and embeddings are padded with zeros, norm weights scaled by
    sqrt(d/D) and their epsilon by d/D, and the heads of the attention go into their kv groups; see
    laboratory.cost_faithful.
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


@click.command()
@click.argument("folder", type=FOLDER)
@click.argument("target", type=FILE)
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--type", "quant", type=click.Choice(["F16", "Q8_0"]), default="F16", show_default=True)
def main(folder: Path, target: Path, destination: Path, quant: str) -> None:
    """Convert the head in FOLDER for the model TARGET; prints the size of the file as JSON."""
    convert(folder, target, destination, quant)
    click.echo(json.dumps({"benchmark": "eagle3_gguf", "bytes": destination.stat().st_size}))


if __name__ == "__main__":
    main()
