"""Heads in GGUF files: architectures eagle3, dflash and gemma4-assistant, and MTP layers of any other.

Keys and tensors are those that llama.cpp reads. `target_layers` holds inputs of layers, as HeadSpec.layers does.
"""

from __future__ import annotations

import re

import numpy as np

from edgespec.formats.gguf import MAX_BLOCKS, Header
from edgespec.formats.head_tensors import eagle3_names
from edgespec.formats.heads import USUAL_BLOCK, HeadSpec

_MAX_SIZE = 2**24
_BLOCK = re.compile(r"blk\.(\d+)\.")


def read_gguf_head(header: Header) -> HeadSpec | None:
    """The head in a GGUF file, of which a split one's parts are joined; None where there is none.

    Raises InvalidModelFile for a head that its own metadata and tensors do not describe.
    """
    if header.is_later_part:
        return None
    match header.architecture:
        case "eagle3":
            return _read_eagle3(header)
        case "dflash":
            return _read_dflash(header)
        case "gemma4-assistant":
            return _read_assistant(header)
        case _:
            return _read_mtp(header)


def _read_eagle3(header: Header) -> HeadSpec:
    eagle3_names(tensor.name for tensor in header.tensors)
    size, hidden_size = _read_size(header, "embedding_length"), _read_size(header, "target_hidden_size")
    layers = _read_layers(header)
    _check_fc(header, len(layers) * hidden_size, size)
    return HeadSpec(
        "eagle3",
        hidden_size,
        layers,
        size,
        _count_draft_vocabulary(header),
        norm_before_residual=_is_set(header, "norm_before_residual"),
        norm_before_fc="all" if _is_set(header, "norm_before_fc") else "none",
    )


def _read_dflash(header: Header) -> HeadSpec:
    size, layers = _read_size(header, "embedding_length"), _read_layers(header)
    _check_fc(header, len(layers) * size, size)
    mask = header.integer("tokenizer.ggml.mask_token_id")
    block = header.own("block_size")
    is_dspark = _find_shape(header, "markov_w1.weight") is not None
    if block is None:
        if is_dspark:  # on which llama.cpp aborts
            raise header.invalid("dflash.block_size is missing")
        block = USUAL_BLOCK
    if (mask is not None and mask < 0) or not 0 < block <= _MAX_SIZE:
        raise header.invalid(f"its blocks have {block} positions, filled with token {mask}")
    return HeadSpec(
        "dspark" if is_dspark else "dflash",
        size,
        layers,
        size,
        _count_draft_vocabulary(header),
        block_size=block,
        mask_token=mask,
        predicts_at_root=is_dspark and header.metadata.get("dflash.sample_from_anchor") is not False,
    )


def _read_assistant(header: Header) -> HeadSpec:
    """A Gemma 4 assistant, which reads the target's last hidden state and attends to the target's cache."""
    hidden_size = _read_size(header, "embedding_length_out")
    size = _read_size(header, "embedding_length")
    return HeadSpec("gemma4-assistant", hidden_size, (), size, _count_draft_vocabulary(header), feeds_normed=True)


def _read_mtp(header: Header) -> HeadSpec | None:
    """MTP layers, which are the last ones of the model; None where the file has the key without the tensors."""
    count = header.own("nextn_predict_layers") or 0
    if count < 1:
        return None
    blocks = header.own("block_count") or 0
    if not count <= blocks <= MAX_BLOCKS:
        raise header.invalid(f"{count} of {blocks} layers predict further tokens")
    if not any(".nextn." in tensor.name for tensor in header.tensors):
        return None
    held = {int(found[1]) for tensor in header.tensors if (found := _BLOCK.match(tensor.name))}
    size = _read_size(header, "embedding_length")
    vocabulary = _count_draft_vocabulary(header)
    in_target = any(block < blocks - count for block in held)
    return HeadSpec("mtp", size, (), size, vocabulary, feeds_normed=True, in_target=in_target)


def _read_size(header: Header, key: str) -> int:
    number = header.own(key)
    if number is None or not 0 < number <= _MAX_SIZE:
        problem = "is missing" if number is None else f"is {number}"
        raise header.invalid(f"{header.architecture}.{key} {problem}")
    return number


def _is_set(header: Header, key: str) -> bool:
    return header.metadata.get(f"{header.architecture}.{key}") is True


def _read_layers(header: Header) -> tuple[int, ...]:
    key = f"{header.architecture}.target_layers"
    found = header.metadata.get(key)
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or not 0 < len(found) <= MAX_BLOCKS:
        raise header.invalid(f"{key} names no layers of a target")
    layers = tuple(int(layer) for layer in found)
    if not all(0 <= layer <= MAX_BLOCKS for layer in layers):
        raise header.invalid(f"{key} names the layers {', '.join(map(str, layers))}")
    return layers


def _check_fc(header: Header, width: int, size: int) -> None:
    shape = _find_shape(header, "fc.weight")
    if shape != (width, size):
        stated = "is missing" if shape is None else f"has the shape {shape}"
        raise header.invalid(f"fc.weight {stated}, where its metadata asks for {(width, size)}")


def _find_shape(header: Header, name: str) -> tuple[int, ...] | None:
    """The shape of a tensor, fastest dimension first."""
    return next((tensor.shape for tensor in header.tensors if tensor.name == name), None)


def _count_draft_vocabulary(header: Header) -> int:
    if ids := _find_shape(header, "d2t"):
        return ids[0]
    if rows := _find_shape(header, "output.weight") or _find_shape(header, "token_embd.weight"):
        return rows[-1]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else 0
