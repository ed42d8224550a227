"""Write the embedded target, a llama, with an MTP layer as a GGUF file that llama.cpp drafts with.

    uv run python -m laboratory.mtp_gguf FOLDER TARGET.gguf MODEL.gguf

llama.cpp has no MTP graph for llama, but one for glm4moe, in which a llama can be expressed. All its layers are dense.
The dense layer of the head is the shared expert of a mixture whose only routed expert is zero. glm4moe rotates halves
of a head's numbers where llama rotates neighbours, so the rows of queries and keys change places. FOLDER has the head
in the names of Hugging Face (`mtp.fc`, `mtp.layers.0`). With `--alone` the file holds the head and what llama.cpp
cannot take from the target's file: embeddings and the last norm.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import gguf
import numpy as np

from edgespec.train.head_files import copy_vocabulary, write_shape
from edgespec.train.student import finish_gguf
from laboratory.head_files import FILE, FOLDER, read_weights

_ARCHITECTURE = "glm4moe"
_EXPERT_SIZE = 32  # of the routed expert, and of each of the shared ones
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "ffn_gate_shexp",
    "mlp.up_proj": "ffn_up_shexp",
    "mlp.down_proj": "ffn_down_shexp",
}
_HEAD_NAMES = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
    **{f"mtp.layers.0.{name}": own for name, own in _LAYER_NAMES.items()},
}


def convert(folder: Path, target: Path, destination: Path, *, is_alone: bool = False) -> None:
    """Raises ValueError for a target that is no llama, and a head of another size or without the tensors of a layer."""
    weights = read_weights(folder)
    if missing := [name for name in _HEAD_NAMES if f"{name}.weight" not in weights]:
        raise ValueError(f"the head lacks {missing[0]}.weight")
    source = gguf.GGUFReader(target)
    if source.fields["general.architecture"].contents() != "llama":
        raise ValueError("the target is no llama")
    width, size = source.fields["llama.embedding_length"].contents(), len(weights["mtp.norm.weight"])
    if size != width:
        raise ValueError(f"the head is for a hidden size of {size}, the target of {width}")
    writer = gguf.GGUFWriter(destination, _ARCHITECTURE)
    blocks: int = source.fields["llama.block_count"].contents()
    _write_shape(writer, source, blocks, ffn=len(weights["mtp.layers.0.mlp.gate_proj.weight"]))
    copy_vocabulary(source, writer)
    _copy_target(writer, source, is_alone=is_alone)
    _write_head(writer, weights, f"blk.{blocks}")
    finish_gguf(writer)


def _write_shape(writer: gguf.GGUFWriter, source: gguf.GGUFReader, blocks: int, ffn: int) -> None:
    def own(key: str) -> int:
        value: int = source.fields[f"llama.{key}"].contents()
        return value

    width, heads = own("embedding_length"), own("attention.head_count")
    write_shape(
        writer, context=own("context_length"), width=width, blocks=blocks + 1, ffn=own("feed_forward_length"),
        heads=heads, kv_heads=own("attention.head_count_kv"), head=width // heads, rotated=own("rope.dimension_count"),
        rope_base=own("rope.freq_base"), epsilon=own("attention.layer_norm_rms_epsilon"),
    )  # fmt: skip
    writer.add_nextn_predict_layers(1)
    writer.add_leading_dense_block_count(blocks)
    writer.add_expert_count(1)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(_EXPERT_SIZE)
    writer.add_expert_shared_count(ffn // _EXPERT_SIZE)


def _copy_target(writer: gguf.GGUFWriter, source: gguf.GGUFReader, *, is_alone: bool) -> None:
    heads = {
        "attn_q": source.fields["llama.attention.head_count"].contents(),
        "attn_k": source.fields["llama.attention.head_count_kv"].contents(),
    }
    for tensor in source.tensors:
        kind = tensor.name.split(".")[-2]
        if is_alone and tensor.name.startswith("blk."):
            continue
        data = _halve(tensor.data, heads[kind]) if kind in heads else tensor.data
        name = tensor.name.replace("ffn_norm", "post_attention_norm")
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)


def _write_head(writer: gguf.GGUFWriter, weights: dict[str, np.ndarray], block: str) -> None:
    for name, own in _HEAD_NAMES.items():
        _add(writer, f"{block}.{own}.weight", weights[f"{name}.weight"].astype(np.float32))
    width = len(weights["mtp.norm.weight"])
    _add(writer, f"{block}.ffn_gate_inp.weight", np.zeros((1, width), np.float32))
    _add(writer, f"{block}.exp_probs_b.bias", np.zeros(1, np.float32))
    for own in ("ffn_gate_exps", "ffn_up_exps"):
        _add(writer, f"{block}.{own}.weight", np.zeros((1, _EXPERT_SIZE, width), np.float32))
    _add(writer, f"{block}.ffn_down_exps.weight", np.zeros((1, width, _EXPERT_SIZE), np.float32))


def _add(writer: gguf.GGUFWriter, name: str, array: np.ndarray) -> None:
    """Matrices in Q8_0, as those of the target are; norms and the router in F32."""
    if array.ndim == 1 or name.endswith("ffn_gate_inp.weight"):
        writer.add_tensor(name, array)
    else:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def _halve(data: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of queries or keys, quantized or not: rotated pairs are half a head apart instead of neighbours."""
    rows, columns = data.shape
    return data.reshape(n_heads, rows // n_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


@click.command()
@click.argument("folder", type=FOLDER)
@click.argument("target", type=FILE)
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--alone", is_flag=True, help="Write the head without the target's layers.")
def main(folder: Path, target: Path, destination: Path, alone: bool) -> None:
    """Write TARGET with the MTP layer in FOLDER; prints the size of the file as JSON."""
    convert(folder, target, destination, is_alone=alone)
    click.echo(json.dumps({"benchmark": "mtp_gguf", "bytes": destination.stat().st_size}))


if __name__ == "__main__":
    main()
