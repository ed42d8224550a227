"""Write a large model tensor by tensor, as a GGUF file or a folder of safetensors; a partial file is removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np

from laboratory.embedding.encodings import BITS, FolderStorage, GgufStorage, Part, Storage, encode_tensor
from laboratory.embedding.layout import Tensor, list_tensors
from laboratory.embedding.shapes import Shape
from laboratory.embedding.sources import Source, halve_heads, to_folder_name

_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 15}
_SEED = 0
_CONTEXT = "llama.context_length"


def write(source: Source, destination: Path, large: Shape, storage: Storage, context: int | None = None) -> None:
    """Write `destination`: the function of `source` in the shape `large`. Raises click.ClickException.

    `context` is the stated length of training texts, in tokens; by default the source's.
    """
    if not destination.parent.is_dir():
        raise click.ClickException(f"{destination.parent} does not exist.")
    if isinstance(storage, GgufStorage):
        write_gguf(source, destination, large, storage, context)
    else:
        write_folder(source, destination, large, storage, context)


def write_gguf(source: Source, destination: Path, large: Shape, storage: GgufStorage, context: int | None) -> None:
    """Write the file. Raises click.ClickException where the disk is too small."""
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_name(f"cost-faithful {large.width}x{large.layers}")
    writer.add_embedding_length(large.width)
    writer.add_block_count(large.layers)
    writer.add_feed_forward_length(large.ffn)
    writer.add_head_count(large.heads)
    writer.add_head_count_kv(large.kv_heads)
    writer.add_key_length(large.head)
    writer.add_value_length(large.head)
    writer.add_layer_norm_rms_eps(source.epsilon * source.shape.width / large.width)
    writer.add_file_type(_FILE_TYPES[storage.quant])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for field in source.gguf_fields():
        writer.add_key_value(*(field._replace(value=context) if context and field.key == _CONTEXT else field))
    layout = _list_tensors(source, large)
    size = 0
    for tensor in layout:
        (part,) = storage.encoding(tensor).parts(tensor.columns)
        n_bytes = max(tensor.rows, 1) * part.row_bytes
        kind = gguf.GGMLQuantizationType[part.dtype]
        writer.add_tensor_info(
            f"{tensor.name}.weight", _list_dimensions(tensor, part), np.dtype(np.float32), n_bytes, kind
        )
        size += n_bytes
    _check_disk_space(destination, size)
    with _replace_when_complete(destination) as partial:
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.default_rng(_SEED)
        for tensor in layout:
            writer.write_tensor_data(encode_tensor(tensor, storage.encoding(tensor), source.weights, rng)[0])
        writer.close()


def write_folder(source: Source, destination: Path, large: Shape, storage: FolderStorage, context: int | None) -> None:
    """Write weights, config.json and tokenizer. Raises click.ClickException."""
    if destination.is_file() or (destination.is_dir() and any(destination.iterdir())):
        raise click.ClickException(f"{destination} is neither a .gguf file nor a new or empty folder.")
    config = source.config() | {
        "hidden_size": large.width,
        "num_hidden_layers": large.layers,
        "num_attention_heads": large.heads,
        "num_key_value_heads": large.kv_heads,
        "head_dim": large.head,
        "intermediate_size": large.ffn,
        "rms_norm_eps": source.epsilon * source.shape.width / large.width,
        "torch_dtype": {"BF16": "bfloat16", "F32": "float32"}.get(storage.quant, "float16"),
    }
    if context:
        config["max_position_embeddings"] = context
    if storage.quant in BITS:
        config["quantization"] = {"group_size": storage.group, "bits": BITS[storage.quant], "mode": "affine"}
        config["quantization_config"] = config["quantization"]
    files = source.tokenizer_files() | {"config.json": json.dumps(config, indent=1).encode()}
    layout = _list_tensors(source, large)
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    size = 0
    for tensor in layout:
        for part in storage.encoding(tensor).parts(tensor.columns):
            end = size + max(tensor.rows, 1) * part.row_bytes
            header[to_folder_name(tensor.name) + part.suffix] = {
                "dtype": part.dtype,
                "shape": _list_dimensions(tensor, part),
                "data_offsets": [size, end],
            }
            size = end

    def weights(name: str) -> Any:
        values = source.weights(name)
        return halve_heads(values, large.head) if name.endswith(("attn_q", "attn_k")) else values

    _check_disk_space(destination, size)
    destination.mkdir(exist_ok=True)
    with _replace_when_complete(destination / "model.safetensors") as partial, partial.open("wb") as opened:
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        opened.write(len(text).to_bytes(8, "little") + text)
        rng = np.random.default_rng(_SEED)
        for tensor in layout:
            for array in encode_tensor(tensor, storage.encoding(tensor), weights, rng):
                array.tofile(opened)
    for name, data in files.items():
        (destination / name).write_bytes(data)


def _list_tensors(source: Source, large: Shape) -> list[Tensor]:
    return list(list_tensors(large, source.shape, source.vocab_size, tied=source.tied, rotations=source.rotations))


def _list_dimensions(tensor: Tensor, part: Part) -> list[int]:
    return [tensor.rows, part.row_numbers] if tensor.rows else [part.row_numbers]


def _check_disk_space(destination: Path, size: int) -> None:
    """Raise click.ClickException where the disk has less than `size` bytes free."""
    free = shutil.disk_usage(destination.parent).free
    if size > free:
        raise click.ClickException(
            f"{destination.name} takes {size / 1e9:.1f} GB; {destination.parent} has {free / 1e9:.1f} GB free."
        )


@contextmanager
def _replace_when_complete(file: Path) -> Iterator[Path]:
    """A temporary path next to `file`; renamed to `file` when the context ends without an error."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
