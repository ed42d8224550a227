"""The head in a file or folder, whatever its format; weights are not read and nothing in it is run.

In GGUF files these are the architectures eagle3, dflash and gemma4-assistant, and the MTP layers of any other. Keys
and tensors are those that llama.cpp reads. `target_layers` holds inputs of layers, as HeadSpec.layers does.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from edgespec.formats.gguf import MAGIC, MAX_BLOCKS, MAX_SIZE, FileSource, Header, read_header
from edgespec.formats.head_config import read_config_head
from edgespec.formats.heads import USUAL_BLOCK, HeadSpec
from edgespec.formats.mlx_folder import Folder, read_json, read_safetensors_shapes
from edgespec.formats.torch_pickle import read_pickled_shapes

_BLOCK = re.compile(r"blk\.(\d+)\.")


def read_gguf_head(header: Header) -> HeadSpec | None:
    """The head in a GGUF file; None if there is none. The header of a split file is that of all parts, joined.

    Raises InvalidModelFile for a head that its own metadata and tensors do not describe.
    """
    if header.is_later_part:
        return None
    readers = {"eagle3": _read_eagle3, "dflash": _read_dflash, "gemma4-assistant": _read_assistant}
    return readers.get(header.architecture, _read_mtp)(header)


def _read_eagle3(header: Header) -> HeadSpec:
    size, hidden_size = header.size("embedding_length"), header.size("target_hidden_size")
    layers = _read_layers(header, hidden_size, size)
    return HeadSpec(
        "eagle3",
        hidden_size,
        layers,
        size,
        norm_before_residual=header.metadata.get("eagle3.norm_before_residual") is True,
        norm_before_fc="all" if header.metadata.get("eagle3.norm_before_fc") is True else "none",
    )


def _read_dflash(header: Header) -> HeadSpec:
    size = header.size("embedding_length")
    layers = _read_layers(header, size, size)
    mask = header.integer("tokenizer.ggml.mask_token_id")
    block = header.own("block_size")
    is_dspark = header.shape("markov_w1.weight") is not None
    if block is None and is_dspark:  # on which llama.cpp aborts
        raise header.invalid("dflash.block_size is missing")
    block = USUAL_BLOCK if block is None else block
    if (mask is not None and mask < 0) or not 0 < block <= MAX_SIZE:
        raise header.invalid(f"its blocks have {block} positions, filled with token {mask}")
    return HeadSpec(
        "dspark" if is_dspark else "dflash",
        size,
        layers,
        size,
        block_size=block,
        mask_token=mask,
        predicts_at_root=is_dspark and header.metadata.get("dflash.sample_from_anchor") is not False,
    )


def _read_assistant(header: Header) -> HeadSpec:
    """A Gemma 4 assistant, which reads the target's last hidden state and attends to the target's cache."""
    hidden_size, size = header.size("embedding_length_out"), header.size("embedding_length")
    return HeadSpec("gemma4-assistant", hidden_size, (), size, feeds_normed=True)


def _read_mtp(header: Header) -> HeadSpec | None:
    """MTP layers, which are the model's last ones; None if the file lacks their key or tensors."""
    count = header.own("nextn_predict_layers") or 0
    if count < 1:
        return None
    blocks = header.own("block_count") or 0
    if not any(".nextn." in tensor.name for tensor in header.tensors):
        return None
    held = {int(found[1]) for tensor in header.tensors if (found := _BLOCK.match(tensor.name))}
    size = header.size("embedding_length")
    in_target = any(block < blocks - count for block in held)
    return HeadSpec("mtp", size, (), size, feeds_normed=True, in_target=in_target)


def _read_layers(header: Header, hidden_size: int, size: int) -> tuple[int, ...]:
    """The target's layers whose states, `hidden_size` numbers each, the first matrix joins to `size` numbers."""
    key = f"{header.architecture}.target_layers"
    found = header.metadata.get(key)
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or not 0 < len(found) <= MAX_BLOCKS:
        raise header.invalid(f"{key} names no layers of a target")
    layers = tuple(int(layer) for layer in found)
    if not all(0 <= layer <= MAX_BLOCKS for layer in layers):
        raise header.invalid(f"{key} names the layers {', '.join(map(str, layers))}")
    shape, asked = header.shape("fc.weight"), (len(layers) * hidden_size, size)
    if shape != asked:
        stated = "is missing" if shape is None else f"has the shape {shape}"
        raise header.invalid(f"fc.weight {stated}, where its metadata asks for {asked}")
    return layers


PICKLES = ("pytorch_model*.bin", "*lm_head*.pt", "model*.pt")


def read_head(path: Path) -> HeadSpec | None:
    """The head in a GGUF file or a folder with config.json; None if it has no head or does not exist.

    For a split GGUF file, join the headers and call `read_gguf_head`: this reads one part only. `layers` are what the
    format documents (see formats.heads), which a probe of the head may correct. Raises InvalidModelFile, CacheError.
    """
    if path.is_dir():
        config = path / "config.json"
        return read_config_head(read_json(config) if config.is_file() else {}, read_folder_shapes(path))
    if not path.is_file():
        return None
    source = FileSource(path)
    return read_gguf_head(read_header(source, path.name)) if source.read(0, len(MAGIC)) == MAGIC else None


def read_folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of a folder's safetensors, or else of its pickles. Raises InvalidModelFile, CacheError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in find_weights(folder):
        is_pickle = file.suffix != ".safetensors"
        shapes |= read_pickled_shapes(file) if is_pickle else read_safetensors_shapes(FileSource(file), str(file))
    return shapes


def find_weights(folder: Path) -> list[Path]:
    """The safetensors in a folder, or else its pickles, which formats.torch_pickle reads."""
    found = sorted(folder.glob("*.safetensors"))
    return found or sorted({file for pattern in PICKLES for file in folder.glob(pattern)})


ModelMetadata = Header | Folder
"""Metadata of a model before it is loaded."""
