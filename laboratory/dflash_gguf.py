"""Convert a DFlash or DSpark head in a folder (config.json, safetensors) to the GGUF file that llama.cpp reads.

    uv run python -m laboratory.dflash_gguf FOLDER TARGET.gguf HEAD.gguf

The vocabulary is copied from the target's file. Matrices are stored in F16, norms in F32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np

from edgespec.formats.head_config import read_config_head
from edgespec.formats.head_tensors import read_draft_ids
from edgespec.formats.heads import HeadSpec
from edgespec.train.head_files import copy_vocabulary, write_shape
from edgespec.train.student import finish_gguf
from laboratory.head_files import FILE, FOLDER, read_weights

_NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(folder: Path, target: Path, destination: Path) -> None:
    """Raises InvalidModelFile for a folder without such a head, ValueError for one that llama.cpp cannot run."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name.removeprefix("model."): array for name, array in read_weights(folder).items()}
    spec = read_config_head(config, {name: array.shape for name, array in weights.items()})
    if spec is None or spec.kind not in ("dflash", "dspark") or not spec.layers or spec.mask_token is None:
        raise ValueError("the folder has no DFlash or DSpark head with layers of the target and a mask token")
    shape = {**config, **config.get("transformer_layer_config", {})}
    writer = gguf.GGUFWriter(destination, "dflash")
    vocab_size = copy_vocabulary(gguf.GGUFReader(target), writer)
    _write_shape(writer, shape)
    _write_block(writer, spec, shape)
    names = _find_names(weights, shape["num_hidden_layers"])
    writer.add_bool("dflash.has_confidence_head", "confidence_head.proj.weight" in names)
    for name, own in names.items():
        array = weights[name].astype(np.float32)
        writer.add_tensor(own, array.astype(np.float16) if array.ndim == 2 and min(array.shape) > 1 else array)
    if "d2t" in weights:
        ids = read_draft_ids(weights["d2t"], vocab_size)
        writer.add_tensor("d2t", ids.astype(np.int64))
    finish_gguf(writer)


def _write_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    n_heads, size = config["num_attention_heads"], config["hidden_size"]
    width = config.get("head_dim") or size // n_heads
    rope = {**config, **(config.get("rope_parameters") or {})}
    write_shape(
        writer, context=config["max_position_embeddings"], width=size, blocks=config["num_hidden_layers"],
        ffn=config["intermediate_size"], heads=n_heads, kv_heads=config.get("num_key_value_heads", n_heads), head=width,
        rotated=int(width * rope.get("partial_rotary_factor", 1.0)), rope_base=float(rope.get("rope_theta", 10000.0)),
        epsilon=float(config["rms_norm_eps"]),
    )  # fmt: skip
    if config.get("use_sliding_window") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _write_block(writer: gguf.GGUFWriter, spec: HeadSpec, config: Mapping[str, Any]) -> None:
    assert spec.layers is not None and spec.mask_token is not None
    writer.add_array("dflash.target_layers", list(spec.layers))
    writer.add_uint32("dflash.block_size", spec.block_size)
    writer.add_mask_token_id(spec.mask_token)
    if spec.kind == "dspark":
        writer.add_bool("dflash.sample_from_anchor", spec.predicts_at_root)
    causal = config.get("is_causal", config.get("dflash_config", {}).get("causal"))
    if causal is not None:
        writer.add_bool("dflash.attention.causal", bool(causal))


def _find_names(weights: Mapping[str, np.ndarray], layers: int) -> dict[str, str]:
    """Name in the folder -> name in the file, of the tensors that are there. Raises ValueError where one is not known.

    Heads for all tokens take the target's output matrix.
    """
    found = dict(_NAMES)
    for i in range(layers):
        found |= {f"layers.{i}.{name}": f"blk.{i}.{own}" for name, own in _LAYER_NAMES.items()}
    endings = ("weight", "bias")
    every = {f"{name}.{end}": f"{own}.{end}" for name, own in found.items() for end in endings}
    if unknown := sorted(weights.keys() - every.keys() - {"d2t", "t2d"}):
        raise ValueError(f"llama.cpp has no place for {unknown[0]}")
    return {name: own for name, own in every.items() if name in weights}


@click.command()
@click.argument("folder", type=FOLDER)
@click.argument("target", type=FILE)
@click.argument("destination", type=click.Path(path_type=Path))
def main(folder: Path, target: Path, destination: Path) -> None:
    """Convert the head in FOLDER for the model TARGET; prints the size of the file as JSON."""
    convert(folder, target, destination)
    click.echo(json.dumps({"benchmark": "dflash_gguf", "bytes": destination.stat().st_size}))


if __name__ == "__main__":
    main()
