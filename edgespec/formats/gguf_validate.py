"""Checks of GGUF header values on which llama.cpp would abort the process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf import MAX_BLOCKS, MAX_SIZE, FileSource, Header, read_header

_MAX_EXPERTS = 1024  # compiled into llama.cpp
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Architectures with attention in every layer; others may state 0 kv heads for some layers.
_DENSE = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_CHECKED = (*_EPSILONS, "rope.scaling.type", "rope.dimension_count", "attention.causal")
_LOOKING_AHEAD = ("dflash",)  # heads, inside a block
_NO_WEIGHTS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")  # types that no matrix is multiplied in
_IDS = ("d2t", "t2d", "tid2eid")  # tables of ids, by the ends of their names


def read_file(path: Path) -> Header:
    """The header of a local model, or of a later part of a split one. Raises InvalidModelFile, CacheError."""
    header = read_header(FileSource(path), path.name)
    check_model(header)
    return header


_OTHER_KINDS = {  # `general.type`, or the architecture of older files: what it is, and where it belongs
    "adapter": (
        "is a LoRA adapter, which changes the weights of another model",
        "Merge it into its base model with llama-export-lora, and open the file that it writes.",
    ),
    "mmproj": (
        "is a projector (mmproj), which shows images to the model beside it",
        "Name the file of that model; edgespec reads text only.",
    ),
    "imatrix": (
        "is an importance matrix (imatrix), which llama-quantize reads to quantize a model",
        "Name a file of that model.",
    ),
    "controlvector": (
        "is a control vector, which llama.cpp adds to the states of another model",
        "Name the file of that model; edgespec adds no control vectors.",
    ),
}
_OTHER_KINDS["clip"] = _OTHER_KINDS["mmproj"]


def check_model(header: Header) -> None:
    """Raise InvalidModelFile for a header that llama.cpp cannot load or would crash on."""
    for key in ("general.type", "general.architecture"):
        kind = header.metadata.get(key)
        if isinstance(kind, str) and kind in _OTHER_KINDS:
            what, hint = _OTHER_KINDS[kind]
            raise InvalidModelFile(f"'{header.name}' {what}.", hint=hint)
    _check_types(header)
    if header.is_later_part:
        return
    for key, limit in (("block_count", MAX_BLOCKS), ("embedding_length", MAX_SIZE), ("context_length", 2**31 - 1)):
        header.size(key, limit)
    if not header.tensors:
        raise header.invalid("it holds no tensors")
    if not (tokens := header.tokens):
        raise header.invalid("it holds no vocabulary (tokenizer.ggml.tokens)")
    for key in ("token_type", "scores"):
        column = header.metadata.get(f"tokenizer.ggml.{key}")
        if column is not None and (not isinstance(column, np.ndarray) or len(column) != len(tokens)):
            raise header.invalid(f"tokenizer.ggml.{key} does not have one number for each of {len(tokens):,} tokens")
    for is_wrong, fault in (*_check_layers(header), *_check_vocabulary(header, tokens)):
        if is_wrong:
            raise header.invalid(fault)


def _check_types(header: Header) -> None:
    """Raise InvalidModelFile if a tensor has a type that llama.cpp cannot compute with."""
    for tensor in header.tensors:
        kind, name = tensor.type.name, tensor.name.removesuffix(".weight")
        is_added = name.endswith(("norm", "norm_2", ".bias"))
        if (is_added and kind != "F32") or (kind in _NO_WEIGHTS and not name.endswith(_IDS)):
            raise header.invalid(f"its tensor {tensor.name!a} has the type {kind}, which llama.cpp cannot compute with")


def _check_layers(header: Header) -> Iterator[tuple[bool, str]]:
    """Yield (whether the file has it, a fault of layers that would abort the process)."""
    values = {key: header.metadata.get(f"{header.architecture}.{key}") for key in _CHECKED}
    for key in _EPSILONS:
        epsilon = values[key]
        yield isinstance(epsilon, float) and not 0 <= epsilon < math.inf, f"{key} is {epsilon}"
    kind = values["rope.scaling.type"]
    yield kind is not None and kind not in _ROPE_SCALINGS, f"the type of its rotary positions is {kind!a}"
    rotated, size = values["rope.dimension_count"], header.own("attention.key_length")
    if type(rotated) is int:
        yield rotated % 2 == 1, f"{rotated} numbers of a head are rotated in pairs"
        yield size is not None and rotated > size, f"{rotated} numbers of a head are rotated, and it has {size}"
        # llama.cpp loads such a file forever. Latent attention may go without.
        yield rotated == 0 and header.own("attention.key_length_mla") is None, "no number of a head is rotated"
    count, used = header.own("expert_count") or 0, header.own("expert_used_count") or 0
    yield bool(count or used) and not 1 <= used <= count <= _MAX_EXPERTS, f"{used} of {count} experts are used"
    blocks, nextn = header.own("block_count") or 0, header.own("nextn_predict_layers") or 0
    yield not 0 <= nextn <= blocks, f"{nextn} of {blocks} layers predict further tokens"
    looks_ahead = values["attention.causal"] is False and header.architecture not in _LOOKING_AHEAD
    yield looks_ahead, "its attention looks ahead, as no model that writes text does"
    heads, kv_heads = header.per_block("attention.head_count"), header.per_block("attention.head_count_kv")
    if header.architecture in _DENSE and heads and kv_heads:
        for n, n_kv in zip(heads, kv_heads, strict=False):
            yield n_kv < 1 or n % n_kv > 0, f"{n} heads share {n_kv} key-value heads"


def _check_vocabulary(header: Header, tokens: list[str]) -> Iterator[tuple[bool, str]]:
    """Yield (whether the file has it, a fault of the vocabulary that would abort the process)."""
    kind = header.metadata.get("tokenizer.ggml.model")
    yield kind in ("no_vocab", "none"), "it has no vocabulary"
    seen = set(tokens)
    # llama.cpp cuts a token at its first NUL, and names an empty one by its id.
    if "" in seen or "\0" in "".join(tokens):
        seen = {token.split("\0", 1)[0] or f"[EMPTY_{i}]" for i, token in enumerate(tokens)}
    double = len(tokens) - len(seen)
    yield double > 0, f"{double:,} tokens stand in its vocabulary twice"
    if kind == "llama":
        lacking = next((b for b in range(256) if f"<0x{b:02X}>" not in seen and chr(b) not in seen), None)
        yield lacking is not None, f"its vocabulary has no token for byte {lacking}"
