"""Tensors of a head's folder on MLX, by neutral name (formats.heads), as checked modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from edgespec.backends.attached_draft import OTHER_HEAD, Unsupported
from edgespec.backends.mlx.caches import KeyValues
from edgespec.backends.mlx.library import device, map_errors
from edgespec.errors import InvalidModelFile, reason_of
from edgespec.formats.head_file import find_weights
from edgespec.formats.heads import HEAD_HINT, read_draft_ids
from edgespec.formats.mlx_folder import read_json
from edgespec.formats.torch_pickle import read_pickled_tensors
from edgespec.text.tokenizer import Tokenizer


class HeadWeights:
    """Arrays of a file by their neutral name, of which a network takes what it needs.

    On a GPU they keep their type; on a CPU, which emulates half precision, they become float32. A matrix that MLX has
    quantized has `scales` and `biases` beside its `weight`.
    """

    def __init__(self, arrays: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """`names` leads from neutral names to those of `arrays`."""
        self.names = names
        self._arrays = arrays
        self._taken: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def nbytes(self) -> int:
        """Size of the arrays that were taken."""
        return sum(array.nbytes for array in self._taken.values())

    @property
    def layer_prefixes(self) -> list[str]:
        """What the names of each layer begin with; nothing where there is one layer."""
        numbered = sum(name.endswith(".q") for name in self.names)
        return [f"{i}." for i in range(numbered)] or [""]

    @property
    def dtype(self) -> Any:
        """Compute dtype: the first float tensor's."""
        return next(array.dtype for array in self._taken.values() if mx.issubdtype(array.dtype, mx.floating))

    def vector(self, name: str, size: int, shift: float = 0.0) -> Any:
        """[size] such as the weights of a norm, plus `shift`. Raises InvalidModelFile."""
        self._check(name, (size,), self.shape(name))
        return self._take(self.names[name], lambda x: x + shift if shift else x)

    def table(self, name: str) -> Any:
        """An array as it is in the file, such as the ids of a reduced vocabulary."""
        return self._take(self.names[name])

    def linear(self, name: str, rows: int, columns: int) -> Any:
        """A layer for the matrix [rows, columns], with a bias if the file has one. Raises InvalidModelFile."""
        bias = self._arrays.get(f"{self._stem(name)}.bias")
        if bias is not None:
            self._check(f"{name}.bias", (rows,), tuple(bias.shape))
        return self._make((nn.Linear, nn.QuantizedLinear), name, (rows, columns), columns, rows, bias is not None)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Any:
        """mlx-lm's layer that multiplies by some of the matrices [count, rows, columns]. Raises InvalidModelFile."""
        return self._make((SwitchLinear, QuantizedSwitchLinear), name, shape, *shape[::-1], False)

    def embedding(self, name: str, rows: int, columns: int) -> Any:
        """A layer that looks up rows [columns] by token. Raises InvalidModelFile."""
        return self._make((nn.Embedding, nn.QuantizedEmbedding), name, (rows, columns), rows, columns)

    def mean(self, name: str) -> float:
        """The mean of an array's elements. Raises BackendError."""
        with map_errors():
            return float(mx.mean(self._arrays[self.names[name]].astype(mx.float32)).item())

    def load(self) -> None:
        """Read what was taken from the files. Raises BackendError."""
        with map_errors():
            mx.eval(self._taken)

    def _stem(self, name: str) -> str:
        return self.names[name].removesuffix(".weight")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array as it is in the file."""
        return tuple(self._arrays[self.names[name]].shape)

    def _take(self, key: str, change: Callable[[Any], Any] = lambda x: x) -> Any:
        array = change(self._arrays[key])
        if mx.issubdtype(array.dtype, mx.floating) and not device().on_gpu:
            array = array.astype(mx.float32)
        self._taken[key] = array
        return array

    def _make(self, kinds: tuple[Any, Any], name: str, shape: tuple[int, ...], *sizes: int) -> Any:
        """A layer of the first of `kinds`, or of the second where the file is quantized, made with `sizes`."""
        plain, quantized = kinds
        settings = self._read_quantization(name, shape)
        layer = plain(*sizes) if settings is None else quantized(*sizes, *settings)
        for part in layer.parameters():
            layer[part] = self._take(f"{self._stem(name)}.{part}")
        return layer

    def _read_quantization(self, name: str, expected: tuple[int, ...]) -> tuple[int, int] | None:
        """(elements that share a scale, bits of one); None for plain matrices. Raises InvalidModelFile."""
        stem, shape = self._stem(name), self.shape(name)
        scales = self._arrays.get(f"{stem}.scales")
        if scales is None:
            self._check(name, expected, shape)
            return None
        biases = self._arrays.get(f"{stem}.biases")
        if biases is None or biases.shape != scales.shape or scales.ndim != len(expected):
            raise InvalidModelFile(
                f"The head's tensor {name} is not quantized as MLX does by default, with scales and biases.",
                hint="Use the head's release in half precision, or one of 4 or 8 bits.",
            )
        columns = expected[-1]
        group, bits = columns // scales.shape[-1], 32 * shape[-1] // columns
        self._check(name, expected, (*shape[:-1], scales.shape[-1] * group))
        if shape[-1] * 32 != columns * bits or bits not in (2, 3, 4, 5, 6, 8):
            raise InvalidModelFile(f"The head's tensor {name} is quantized in an unknown way.", hint=HEAD_HINT)
        return group, bits

    def _check(self, name: str, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if shape != expected:
            raise InvalidModelFile(f"The head's tensor {name} has the shape {shape}, not {expected}.", hint=HEAD_HINT)


def read_arrays(folder: Path) -> dict[str, Any]:
    """Array by name of a folder's safetensors, or else of its pickles; lazy. Raises InvalidModelFile, CacheError."""
    arrays: dict[str, Any] = {}
    for file in find_weights(folder):
        try:
            if file.suffix == ".safetensors":
                arrays |= mx.load(str(file))
            else:
                arrays |= {name: mx.array(each) for name, each in read_pickled_tensors(file).items()}
        except RuntimeError as error:
            raise InvalidModelFile(f"MLX cannot read {file}: {reason_of(error)}.", hint=HEAD_HINT) from error
    return arrays


# The transformer layer of a trained head on MLX: llama's, with what other families add to its attention.


_MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What config.json says of a layer.

    size       of its output
    heads      of the queries, `kv_heads` of keys and values, with `head_dim` numbers each
    eps        of its norms
    rope       mlx-lm's module that rotates [1, heads, n, head_dim] from a position on
    n_active   experts of a mixture that see a token; 1 where the config names none
    is_scaled  whether the weights of these experts are scaled to a sum of 1
    """

    size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Any
    n_active: int
    is_scaled: bool


def read_layer_shape(folder: Path, usual: Mapping[str, Any] | None = None) -> LayerShape:
    """Reads the config in a head's folder; `usual` has what it leaves out. Raises InvalidModelFile, CacheError."""
    return make_layer_shape({**(usual or {}), **read_head_config(folder)}, f"{folder.name}/config.json")


def make_layer_shape(config: Mapping[str, Any], name: str) -> LayerShape:
    """The shape that a config states; `name` is that of its file. Raises InvalidModelFile."""
    try:
        size, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or size // heads
        kv_heads, n_active = config.get("num_key_value_heads") or heads, config.get("num_experts_per_tok") or 1
        if not all(type(n) is int and 0 < n <= _MAX_SIZE for n in (size, heads, head_dim, kv_heads, n_active)):
            raise ValueError(f"{heads} heads of {head_dim} numbers, {size} in all")
        eps, rope = float(config.get("rms_norm_eps", 1e-6)), _make_rope(config, head_dim)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise InvalidModelFile(f"{name} describes no layer: {reason_of(error)}.", hint=HEAD_HINT) from error
    return LayerShape(size, heads, kv_heads, head_dim, eps, rope, n_active, config.get("norm_topk_prob") is not False)


def read_head_config(folder: Path) -> dict[str, Any]:
    """The config of a head; tables for a text model or a layer go first. Raises InvalidModelFile, CacheError."""
    config = read_json(folder / "config.json")
    for key in ("text_config", "transformer_layer_config", "dflash_config"):
        if isinstance(table := config.get(key), dict):
            config = {**config, **table}
    return config


def _make_rope(config: Mapping[str, Any], head_dim: int) -> Any:
    """Newer configs keep the settings of the rotation in a table of their own."""
    table = config.get("rope_parameters") or {}
    base = config.get("rope_theta") or table.get("rope_theta") or 10_000.0
    share = config.get("partial_rotary_factor") or table.get("partial_rotary_factor") or 1.0
    return initialize_rope(
        int(head_dim * share),
        float(base),
        config.get("rope_traditional") is True,
        config.get("rope_scaling") or table or None,
        config.get("max_position_embeddings"),
    )


class Mlp:
    """Llama's."""

    def __init__(self, weights: HeadWeights, shape: LayerShape, prefix: str) -> None:
        """Raises InvalidModelFile for tensors of other shapes."""
        inner = weights.shape(f"{prefix}gate")[0]
        self._gate = weights.linear(f"{prefix}gate", inner, shape.size)
        self._up = weights.linear(f"{prefix}up", inner, shape.size)
        self._down = weights.linear(f"{prefix}down", shape.size, inner)

    def __call__(self, x: Any) -> Any:
        return self._down(nn.silu(self._gate(x)) * self._up(x))


class ExpertMlp:
    """Qwen's mixture of experts, with one that sees all tokens where the file has it."""

    def __init__(self, weights: HeadWeights, shape: LayerShape, prefix: str) -> None:
        """Raises InvalidModelFile for tensors of other shapes."""
        self._shape = shape
        count, inner = weights.shape(f"{prefix}router")[0], weights.shape(f"{prefix}gate")[-2]
        if count < shape.n_active:
            raise InvalidModelFile(f"The head has {count} experts, and a token {shape.n_active}.", hint=HEAD_HINT)
        self._router = weights.linear(f"{prefix}router", count, shape.size)
        self._experts = SwitchGLU(shape.size, inner, count)
        self._experts.gate_proj = weights.experts(f"{prefix}gate", (count, inner, shape.size))
        self._experts.up_proj = weights.experts(f"{prefix}up", (count, inner, shape.size))
        self._experts.down_proj = weights.experts(f"{prefix}down", (count, shape.size, inner))
        has_shared = f"{prefix}shared_router" in weights
        self._shared = Mlp(weights, shape, f"{prefix}shared_") if has_shared else None
        self._shared_gate: Any = weights.linear(f"{prefix}shared_router", 1, shape.size) if has_shared else None

    def __call__(self, x: Any) -> Any:
        share = mx.softmax(self._router(x), axis=-1, precise=True)
        chosen = mx.argpartition(share, kth=-self._shape.n_active, axis=-1)[..., -self._shape.n_active :]
        share = mx.take_along_axis(share, chosen, axis=-1)
        if self._shape.is_scaled:
            share = share / share.sum(axis=-1, keepdims=True)
        y = (self._experts(x, chosen) * share[..., None]).sum(axis=-2)
        return y if self._shared is None else y + mx.sigmoid(self._shared_gate(x)) * self._shared(x)


class HeadLayer:
    """A layer of llama, with what its tensors add: biases, norms of queries and keys (Qwen3), a gate (Qwen3-Next)."""

    def __init__(
        self, weights: HeadWeights, shape: LayerShape, width: int, prefix: str = "", shift: float = 0.0
    ) -> None:
        """`width`: of the attention's input; `shift`: of the norms' weights. Raises InvalidModelFile."""
        self._shape = shape
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self._is_gated = weights.shape(f"{prefix}q")[0] == 2 * heads * head_dim
        self._q = weights.linear(f"{prefix}q", (1 + self._is_gated) * heads * head_dim, width)
        self._k = weights.linear(f"{prefix}k", kv_heads * head_dim, width)
        self._v = weights.linear(f"{prefix}v", kv_heads * head_dim, width)
        self._o = weights.linear(f"{prefix}o", shape.size, heads * head_dim)
        sizes = {"attention_norm": width, "ffn_norm": shape.size, "q_norm": head_dim, "k_norm": head_dim}
        self._norms = {
            name: weights.vector(f"{prefix}{name}", size, shift)
            for name, size in sizes.items()
            if f"{prefix}{name}" in weights
        }
        kind = ExpertMlp if f"{prefix}router" in weights else Mlp
        self._mlp = kind(weights, shape, prefix)

    def run(self, x: Any, cache: KeyValues, residual: Any) -> Any:
        """[n, size] of rows `x` [n, width], which follow those in `cache`, added to `residual` [n, size]."""
        h = residual + self._attend(self._norm(x, "attention_norm"), cache)
        return h + self._mlp(self._norm(h, "ffn_norm"))

    def inject(self, states: Any, cache: KeyValues) -> None:
        cache.update_and_fetch(*self._keys_and_values(states, cache))

    def _keys_and_values(self, x: Any, cache: KeyValues) -> tuple[Any, Any]:
        split = 1, len(x), self._shape.kv_heads, -1
        keys = self._rotate(self._norm(self._k(x).reshape(split), "k_norm"), cache.offset)
        return keys, self._v(x).reshape(split).transpose(0, 2, 1, 3)

    def _attend(self, x: Any, cache: KeyValues) -> Any:
        n, mask = len(x), cache.make_mask(len(x))
        queries, gate = self._q(x).reshape(1, n, self._shape.heads, -1), None
        if self._is_gated:
            queries, gate = mx.split(queries, 2, axis=-1)
        queries = self._rotate(self._norm(queries, "q_norm"), cache.offset)
        keys, values = cache.update_and_fetch(*self._keys_and_values(x, cache))
        y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._shape.head_dim**-0.5, mask=mask)
        y = y.transpose(0, 2, 1, 3).reshape(n, -1)
        return self._o(y if gate is None else y * mx.sigmoid(gate.reshape(n, -1)))

    def _norm(self, x: Any, name: str) -> Any:
        return mx.fast.rms_norm(x, self._norms[name], self._shape.eps) if name in self._norms else x

    def _rotate(self, x: Any, position: Any) -> Any:
        return self._shape.rope(x.transpose(0, 2, 1, 3), offset=position)


# The tokens that a head scores: all of the target's, those of its own file, or the frequent ones alone.
#
# A head with the target's whole vocabulary spends most of its time on the output matrix. Frequency-ranked drafting
# (FR-Spec, Zhao et al. 2025, arXiv:2502.14856) multiplies the rows of frequent tokens alone. The target still scores
# all tokens, so the text stays the same; a token that is left out is never drafted.


_RECENT = 256  # tokens of a text that tell which vocabulary it needs


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens that a head scores. `ids` [W] are the target's; None where the head has all V."""

    ids: Any
    vocab_size: int

    @property
    def size(self) -> int:
        """W"""
        return self.vocab_size if self.ids is None else int(self.ids.size)

    def spread(self, scores: Any) -> Any:
        """Logits [n, V] of `scores` [n, W]; -inf for tokens that the head does not know."""
        if self.ids is None:
            return scores
        whole = mx.full((scores.shape[0], self.vocab_size), -mx.inf)
        whole[:, self.ids] = scores
        return whole


@dataclass(frozen=True, slots=True)
class ShortVocabulary:
    """A head that scores frequent tokens alone.

    network  the head
    is_kept  [V] which tokens it scores
    saved    share of a round's time that it saves
    """

    network: Any
    is_kept: npt.NDArray[np.bool_]
    saved: float

    def suits(self, text: Sequence[int]) -> bool:
        """Whether less of the last tokens of `text` is left out than time is saved.

        An answer goes on in the language of its text. A token that is left out ends a draft, so that a share of such
        tokens costs about the same share of the tokens that a round emits.
        """
        recent = self.is_kept[np.array(text[-_RECENT:], np.intp)]
        return int(np.count_nonzero(~recent)) < self.saved * len(recent)


def choose_frequent(tokenizer: Tokenizer, count: int) -> npt.NDArray[np.int32]:
    """The ids [count] of frequent tokens, ascending: what spells single ASCII characters, then the lowest ids.

    Vocabularies of byte-pair encodings list their merges by frequency. SentencePiece puts single characters last.
    """
    characters = [*map(chr, range(32, 127)), "\n", "\t"]
    spelled = {token for each in characters for token in tokenizer.encode(f"x{each} {each}", parse_special=False)}
    rest = (token for token in range(tokenizer.vocab_size) if token not in spelled)
    kept = [*spelled, *(token for token, _ in zip(rest, range(count - len(spelled)), strict=False))]
    return np.sort(np.array(kept, np.int32))


def take_rows(multiply: Callable[[Any], Any], ids: Any) -> tuple[Callable[[Any], Any], int]:
    """What multiplies by the rows `ids` [W] of an output matrix, which are copied, and their bytes.

    `multiply` is a linear layer, or `as_linear` of embeddings; either may be quantized. Raises Unsupported for others.
    """
    module = getattr(multiply, "__self__", multiply)
    if not isinstance(module, nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding):
        raise Unsupported(f"{type(module).__name__} has no rows to take.", hint=OTHER_HEAD)
    rows = copy.copy(module)
    for name in rows.parameters():
        rows[name] = module[name][ids]
    mx.eval(rows.parameters())
    is_embedding = isinstance(rows, nn.Embedding | nn.QuantizedEmbedding)
    return rows.as_linear if is_embedding else rows, sum(rows[name].nbytes for name in rows.parameters())


# What heads share with their target on MLX: its embeddings and its output matrix.


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a head shares with mlx-lm's `model`.

    vocab_size   V
    hidden_size  H
    embed        embeddings [n, H] of tokens [n]
    score        logits [n, V] of states [n, H]
    """

    model: Any
    vocab_size: int
    hidden_size: int
    embed: Callable[[Any], Any]
    score: Callable[[Any], Any]

    def find_embedding(self, weights: HeadWeights, size: int) -> Callable[[Any], Any]:
        """The head's own embeddings [V, size], if it has any. Raises InvalidModelFile."""
        return weights.embedding("embedding", self.vocab_size, size) if "embedding" in weights else self.embed

    def find_output(
        self, weights: HeadWeights, size: int, name: str = "output"
    ) -> tuple[DraftVocabulary, Callable[[Any], Any]]:
        """The tokens that the head scores, and the matrix [W, size]: its own of this name, or the target's.

        Raises InvalidModelFile, and Unsupported for rows that are not tokens of the target.
        """
        rows, ids = weights.shape(name)[0] if name in weights else self.vocab_size, None
        if "d2t" in weights:
            ids = mx.array(read_draft_ids(np.array(weights.table("d2t")), self.vocab_size))
        if rows != (self.vocab_size if ids is None else ids.size):
            raise Unsupported(
                f"the head scores {rows:,} tokens and does not name them in the vocabulary of {self.vocab_size:,}.",
                hint=OTHER_HEAD,
            )
        output = weights.linear(name, rows, size) if name in weights else self.score
        return DraftVocabulary(ids, self.vocab_size), output


def read_target(model: Any) -> TargetParts:
    """Reads shapes from lazy arrays of mlx-lm's model; nothing is computed. Raises Unsupported."""
    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.QuantizedEmbedding)]
    if not embeddings:
        raise Unsupported("this model has no embeddings that a head could share.", hint=OTHER_HEAD)
    outputs = [each for name, each in model.named_modules() if name.rsplit(".", 1)[-1] == "lm_head"]
    embed, token = embeddings[0], mx.array([[0]], mx.int32)
    score = outputs[0] if outputs else embed.as_linear  # where both are tied
    return TargetParts(model, model(token).shape[-1], embed(token).shape[-1], embed, score)
