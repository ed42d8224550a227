"""Files of EAGLE-3 heads that are trained, in the format of their target: GGUF files, or folders for MLX.

A new head begins with weights of its target, so that few texts suffice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from edgespec.backends import Model
from edgespec.backends.head_session import TappedSession
from edgespec.backends.mlx.heads.draft_vocabulary import take_rows
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.model import MlxModel
from edgespec.core.arrays import Ints
from edgespec.errors import DoesNotFit, DraftRefused, InvalidModelFile
from edgespec.files import new_folder, replace_file
from edgespec.formats.gguf_config import read_gguf_config, to_folder_name
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.mlx_folder import read_json
from edgespec.train.head_arrays import GGUF_NAMES, PARTS, dequantize, find_tensors
from edgespec.train.memory_estimate import BYTES_PER_WEIGHT
from edgespec.train.student import copy_fields, finish_gguf, report_unwritable, write_tensors
from edgespec.units import gib

DRAFT_VOCABULARY = 8192
"""Tokens that a new head scores. The output matrix is the largest part of a head, and few tokens are frequent."""

_SPREAD = 0.02  # of weights that are drawn
_FEW = 3  # layers of the target that the head reads
_TYPES = ("llama", "qwen2", "qwen3", "mistral")
_COPIED = (  # keys of config.json
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_traditional", "max_position_embeddings", "vocab_size"),
)


def choose_vocabulary(texts: Iterable[Ints], vocab_size: int) -> Ints:
    """The ids of the most frequent tokens of texts, ascending; of equally frequent ones those of lower ids."""
    counts = sum((np.bincount(tokens, minlength=vocab_size) for tokens in texts), np.zeros(vocab_size, np.int64))
    return np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCABULARY]).astype(np.int32)


def write_new_head(target: Model, source: Path, vocabulary: Ints, to: Path) -> None:
    """Write an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) for the target at `source`, as its runtime reads it.

    Its layer begins with the weights of the target's last layer, except for biases and the norms of queries and keys.
    Its residual stream begins with the highest of the three states that it reads. The weights for the embedding and the
    other states are drawn, and small. Its output matrix [W, size] has the target's rows of `vocabulary` [W].
    `check_target` has let the target pass. Raises InvalidModelFile, CacheError, BackendError.
    """
    config, layers = read_config(source), _choose_layers(target.layer_count)
    with map_errors(), report_unwritable(to):
        if isinstance(target, MlxModel):
            own = _read_mlx_layer(target.network, vocabulary)
            head_dim = own["self_attn.q_proj.weight"].shape[0] // config["num_attention_heads"]
            # A config may state a size that the model ignores.
            config |= {"head_dim": head_dim}
            _write_folder(to, config, _make_head(own, config["hidden_size"]), layers, vocabulary)
        else:
            own = _read_gguf_layer(source, config, vocabulary)
            _write_gguf(to, source, config, _make_head(own, config["hidden_size"]), layers, vocabulary)


def _choose_layers(count: int) -> tuple[int, ...]:
    """The layers whose inputs a new head reads: EAGLE-3's (2, the middle and the third from the end), moved into the
    range of a small target.
    """
    return tuple(sorted(min(max(0, layer), count - 1) for layer in (2, count // 2, count - 3)))


def read_config(source: Path) -> dict[str, Any]:
    """The config.json of a target in a folder, or what stands for it in a GGUF file.

    Raises DraftRefused for a target that can have no new head, InvalidModelFile, CacheError.
    """
    if source.is_dir():
        config = read_json(source / "config.json")
        kind = config.get("model_type")
        reason = "" if kind in _TYPES else f"its type is {kind}"
    else:
        header = read_file(source)
        try:
            config, reason = read_gguf_config(header), ""
        except InvalidModelFile as error:
            reason = error.message.removesuffix(".")
        if header.metadata.get("split.count", 1) != 1:
            reason = "it is split into several files; `llama-gguf-split --merge` joins them"
    if reason:
        raise DraftRefused(
            f"no head is trained for {source.name}: {reason}.",
            hint=f"Models of the types {', '.join(_TYPES)} can have one; `--draft auto` drafts without one.",
        )
    return config


def check_target(target: Model, source: Path, free: int) -> None:
    """Raise DraftRefused, Unsupported if no head can be trained for the target at `source`, and DoesNotFit if
    that needs more than `free` bytes.
    """
    config = read_config(source)
    size, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or size // heads
    rows = 2 * heads + 4 * (config.get("num_key_value_heads") or heads)  # of queries, keys and values: of both halves
    n_weights = size * (_FEW * size + (rows + heads) * head_dim + 3 * config["intermediate_size"] + DRAFT_VOCABULARY)
    needed = BYTES_PER_WEIGHT * n_weights + 2 * size * target.tokenizer.vocab_size
    if needed > free:
        raise DoesNotFit(
            f"training a head needs {gib(needed)} beside the model; {gib(max(free, 0))} are free.",
            hint="Close other programs, or train one for a smaller model.",
        )
    with closing(cast(TappedSession, target.open_session())) as session:
        session.tap(_choose_layers(target.layer_count))


def _read_mlx_layer(network: Any, vocabulary: Ints) -> dict[str, Any]:
    """The last layer's tensors, the last norm and rows of the output matrix, by names as in folders; float32."""
    output = network.lm_head if hasattr(network, "lm_head") else network.model.embed_tokens
    rows, _ = take_rows(output, mx.array(vocabulary))
    found: dict[str, Any] = {}
    parts = {"": network.layers[-1], "model.norm.": network.model.norm, "output.": getattr(rows, "__self__", rows)}
    for prefix, part in parts.items():
        for path, module in part.named_modules():
            name = f"{prefix}{path}.weight" if path else f"{prefix}weight"
            if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
                kind = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
                found[name] = mx.dequantize(module.weight, module.scales, module.get("biases"), **kind)
            elif "weight" in module:
                found[name] = module.weight
    return {name: array.astype(mx.float32) for name, array in found.items()}


def _read_gguf_layer(source: Path, config: Mapping[str, Any], vocabulary: Ints) -> dict[str, Any]:
    """Read what `_read_mlx_layer` reads; a llama's queries and keys are in the order that the config states."""
    tensors, block = find_tensors(source), f"blk.{config['num_hidden_layers'] - 1}."
    own = {
        to_folder_name(name).split(".", 3)[-1]: dequantize(tensor)
        for name, tensor in tensors.items()
        if name.startswith(block)
    }
    own["model.norm.weight"] = dequantize(tensors["output_norm.weight"])
    own["output.weight"] = dequantize(tensors.get("output.weight", tensors["token_embd.weight"]), vocabulary)
    return own


def _make_head(own: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The arrays of a new head with hidden states of `size` numbers, by neutral names; see PARTS."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return mx.array(rng.standard_normal(shape).astype(np.float32) * _SPREAD)

    fused = mx.concatenate([draw(size, (_FEW - 1) * size) / 10, mx.eye(size) + draw(size, size) / 10], axis=1)
    arrays = {
        "fc": fused,
        "embedding_norm": mx.ones(size),
        "feature_norm": own["input_layernorm.weight"],
        "o": own["self_attn.o_proj.weight"],
        "ffn_norm": own["post_attention_layernorm.weight"],
        "output_norm": own["model.norm.weight"],
        "output": own["output.weight"],
    }
    for part in ("gate", "up", "down"):
        arrays[part] = own[f"mlp.{part}_proj.weight"]
    for part in "qkv":
        matrix = own[f"self_attn.{part}_proj.weight"]
        arrays[part] = mx.concatenate([draw(*matrix.shape), matrix], axis=1)
    return arrays


def _write_folder(
    path: Path, config: Mapping[str, Any], arrays: Mapping[str, Any], layers: tuple[int, ...], vocabulary: Ints
) -> None:
    tensors = {f"{PARTS[name][0]}.weight": array.astype(mx.float16) for name, array in arrays.items()}
    tensors["d2t"] = mx.array(vocabulary - np.arange(len(vocabulary)), mx.int64)
    stated = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "target_hidden_size": config["hidden_size"],
        "draft_vocab_size": len(vocabulary),
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        **{key: config[key] for key in _COPIED if key in config},
    }
    with new_folder(path) as partial:
        (partial / "config.json").write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
        write_tensors(partial / "model.safetensors", tensors, {"format": "mlx"})


def _write_gguf(
    path: Path,
    source: Path,
    config: Mapping[str, Any],
    arrays: Mapping[str, Any],
    layers: tuple[int, ...],
    vocabulary: Ints,
) -> None:
    """The vocabulary is copied from the target's file. Matrices are Q8_0 if their rows allow it, else F16."""
    head_dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    with replace_file(path) as partial:
        writer = gguf.GGUFWriter(partial, "eagle3")
        write_shape(
            writer, context=config["max_position_embeddings"], width=config["hidden_size"], blocks=1,
            ffn=config["intermediate_size"], heads=config["num_attention_heads"], kv_heads=kv_heads, head=head_dim,
            rotated=head_dim, rope_base=config["rope_theta"], epsilon=config["rms_norm_eps"],
        )  # fmt: skip
        writer.add_array("eagle3.target_layers", list(layers))
        writer.add_uint32("eagle3.target_hidden_size", config["hidden_size"])
        copy_vocabulary(gguf.GGUFReader(source), writer)
        for name, array in arrays.items():
            matrix = np.array(array)
            if name in "qk" and not config["rope_traditional"]:
                matrix = interleave(matrix, len(matrix) // head_dim)
            kind = "F32" if matrix.ndim == 1 else "F16" if matrix.shape[1] % 32 else "Q8_0"
            dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(GGUF_NAMES[name], gguf.quants.quantize(matrix, dtype), raw_dtype=dtype)
        writer.add_tensor("d2t", vocabulary.astype(np.int64))
        finish_gguf(writer)


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


def copy_vocabulary(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    """Copy all keys of the tokenizer; returns the number of tokens."""
    copy_fields(writer, source, lambda name: name.startswith("tokenizer."))
    n = len(source.fields["tokenizer.ggml.tokens"].data)
    writer.add_vocab_size(n)
    return n


def interleave(matrix: Any, n_heads: int) -> Any:
    """Rows of queries or keys in llama.cpp's order: rotated pairs are neighbours instead of half a head apart."""
    rows, columns = matrix.shape
    return matrix.reshape(n_heads, 2, rows // n_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
