"""Read the small llama model to embed, from a GGUF file or a model folder: shape, weights, settings, vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import click
import gguf
import numpy as np
import numpy.typing as npt

from edgespec.backends.mlx.library import load_mlx
from edgespec.formats.gguf_config import PARTS
from laboratory.embedding import vocabulary
from laboratory.embedding.shapes import Shape
from laboratory.embedding.vocabulary import Field

Floats = npt.NDArray[np.float32]

_ENDS = ("token_embd", "output_norm", "output")
_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "generation_config.json",
)


class Source(Protocol):
    """A small llama. Tensor names and the row order of queries and keys are GGUF's; names lack '.weight'."""

    path: Path
    shape: Shape
    vocab_size: int
    epsilon: float
    tied: bool
    rotations: bool  # whether the tensor rope_freqs scales its rotary frequencies

    def weights(self, name: str) -> Floats:
        """One tensor, in single precision."""

    def gguf_fields(self) -> list[Field]:
        """GGUF metadata that does not depend on the shape. Raises click.ClickException."""

    def config(self) -> dict[str, Any]:
        """config.json without the keys that depend on the shape. Raises click.ClickException."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """Content of the tokenizer's files, by name. Raises click.ClickException."""


def open_source(path: Path) -> Source:
    """Raises click.ClickException for a model that cannot be embedded."""
    return FolderSource(path) if path.is_dir() else GgufSource(path)


def to_folder_name(name: str) -> str:
    """'blk.0.attn_q' -> 'model.layers.0.self_attn.q_proj'"""
    if not name.startswith("blk."):
        return PARTS[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}"


class GgufSource:
    """A GGUF file of any type that llama.cpp reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, OSError) as error:
            raise click.ClickException(f"{path} cannot be read as GGUF: {error}.") from error
        self._fields = reader.fields
        self._tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in reader.tensors}
        if self._get("general.architecture") != "llama":
            raise click.ClickException(f"{path.name} is not a llama: only that architecture can be embedded.")
        width, heads = self._require("llama.embedding_length"), self._require("llama.attention.head_count")
        head = self._get("llama.attention.key_length", width // heads)
        self.shape = Shape(
            width,
            self._require("llama.block_count"),
            heads,
            self._get("llama.attention.head_count_kv", heads),
            self._require("llama.feed_forward_length"),
            head,
        )
        self.epsilon: float = self._require("llama.attention.layer_norm_rms_epsilon")
        self.tied = "output" not in self._tensors
        self.rotations = "rope_freqs" in self._tensors
        check_tensors(path, self._tensors, self.shape)
        if self._get("llama.rope.dimension_count", head) != head:
            raise click.ClickException(f"{path.name} rotates only a part of each head, so it cannot be embedded.")
        self.vocab_size = int(self._tensors["token_embd"].shape[1])

    def weights(self, name: str) -> Floats:
        tensor = self._tensors[name]
        values: Floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return values

    def gguf_fields(self) -> list[Field]:
        prefixes = ("tokenizer.", "llama.rope.", "llama.context_length", "llama.vocab_size")
        return [
            Field(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
            for key, field in self._fields.items()
            if key.startswith(prefixes)
        ]

    def config(self) -> dict[str, Any]:
        if self.rotations or any(key.startswith("llama.rope.scaling") for key in self._fields):
            raise click.ClickException(
                f"{self.path.name} scales its rotary frequencies: embed its Hugging Face folder instead."
            )
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "rope_theta": self._get("llama.rope.freq_base", 10000.0),
            "max_position_embeddings": self._require("llama.context_length"),
            "tie_word_embeddings": self.tied,
            "bos_token_id": self._get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._get("tokenizer.ggml.eos_token_id"),
        }

    def tokenizer_files(self) -> dict[str, bytes]:
        return vocabulary.to_folder({field.key: field.value for field in self.gguf_fields()})

    def _get(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default

    def _require(self, key: str) -> Any:
        if key not in self._fields:
            raise click.ClickException(f"{self.path.name} does not state {key}.")
        return self._fields[key].contents()


class FolderSource:
    """A model folder in the Hugging Face layout, quantized by MLX or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        mx = load_mlx()
        try:
            self._config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            arrays = [mx.load(str(file)).items() for file in sorted(path.glob("model*.safetensors"))]
        except (OSError, ValueError, RuntimeError) as error:
            raise click.ClickException(f"{path} cannot be read as a model folder: {error}.") from error
        c = self._config
        if c.get("model_type") != "llama":
            raise click.ClickException(f"{path.name} is not a llama: only that model_type can be embedded.")
        if missing := [key for key in _REQUIRED if key not in c]:
            raise click.ClickException(f"{path / 'config.json'} does not state {missing[0]}.")
        if "sliding_attention" in c.get("layer_types", ()) or c.get("rope_traditional"):
            raise click.ClickException(
                f"{path.name} has sliding windows or interleaved rotations, so it cannot be embedded."
            )
        self.tied: bool = c.get("tie_word_embeddings", True)
        self._arrays = {
            name: array
            for each in arrays
            for name, array in each
            if "rotary_emb" not in name and not (self.tied and name.startswith("lm_head"))
        }
        heads = c["num_attention_heads"]
        self.shape = Shape(
            c["hidden_size"],
            c["num_hidden_layers"],
            heads,
            c.get("num_key_value_heads") or heads,
            c["intermediate_size"],
            c.get("head_dim") or c["hidden_size"] // heads,
        )
        self.vocab_size: int = c["vocab_size"]
        self.epsilon: float = c["rms_norm_eps"]
        self.rotations = False
        names = {to_folder_name(n): n for n in list_tensor_names(self.shape)}
        found = {name.rsplit(".", 1)[0]: name for name in self._arrays}
        biased = [name for name in self._arrays if name.endswith(".bias")]
        check_tensors(path, [*(names.get(name, name) for name in found), *biased], self.shape)

    def weights(self, name: str) -> Floats:
        mx = load_mlx()
        stem = to_folder_name(name)
        array = self._arrays[f"{stem}.weight"]
        if f"{stem}.scales" in self._arrays:
            options = self._config["quantization"]
            options = {**options, **options.get(stem, {})}
            array = mx.dequantize(
                array,
                self._arrays[f"{stem}.scales"],
                self._arrays.get(f"{stem}.biases"),
                group_size=options["group_size"],
                bits=options["bits"],
                mode=options.get("mode", "affine"),
            )
        values: Floats = np.array(array.astype(mx.float32))
        return interleave_heads(values, self.shape.head) if name.endswith(("attn_q", "attn_k")) else values

    def gguf_fields(self) -> list[Field]:
        rope = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise click.ClickException(f"{self.path.name} scales its rotary frequencies: embed its GGUF file instead.")
        theta = self._config.get("rope_theta") or rope.get("rope_theta") or 10000.0
        value = gguf.GGUFValueType
        return [
            Field("llama.context_length", self._config["max_position_embeddings"], value.UINT32),
            Field("llama.vocab_size", self.vocab_size, value.UINT32),
            Field("llama.rope.dimension_count", self.shape.head, value.UINT32),
            Field("llama.rope.freq_base", float(theta), value.FLOAT32),
            *vocabulary.to_gguf(self.path, self.vocab_size),
        ]

    def config(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in self._config.items()
            if key not in ("quantization", "quantization_config", "layer_types")
        }

    def tokenizer_files(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for pattern in _TOKENIZER_FILES for file in self.path.glob(pattern)}


def list_tensor_names(shape: Shape) -> list[str]:
    """Names of the tensors that a llama of `shape` may have."""
    return [*_ENDS, *(f"blk.{i}.{part}" for i in range(shape.layers) for part in PARTS if part not in _ENDS)]


def check_tensors(path: Path, found: Iterable[str], shape: Shape) -> None:
    """Raise click.ClickException unless `found` are the tensors of a plain llama."""
    wanted = set(list_tensor_names(shape))
    if unknown := sorted(set(found) - wanted - {"rope_freqs"}):
        raise click.ClickException(f"{path.name} has {unknown[0]}, which no plain llama has.")
    if missing := sorted(wanted - set(found) - {"output"}):
        raise click.ClickException(f"{path.name} lacks {missing[0]}.")


def interleave_heads(rows: Floats, head: int) -> Floats:
    """Turn each head's two halves into pairs: GGUF's row order of queries and keys."""
    by_half = rows.reshape(-1, 2, head // 2, rows.shape[-1])
    return np.ascontiguousarray(by_half.swapaxes(1, 2)).reshape(rows.shape)


def halve_heads(rows: Floats, head: int) -> Floats:
    """The inverse of `interleave_heads`."""
    by_pair = rows.reshape(-1, head // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(rows.shape)
