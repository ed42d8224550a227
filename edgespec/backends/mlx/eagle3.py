"""The network of an EAGLE-3 head (Li et al. 2025): one layer over the target's hidden states and the next token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.llama import MLP, Attention, ModelArgs

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.keyvalues import KeyValues
from edgespec.backends.mlx.library import device, map_errors
from edgespec.errors import InvalidModelFile
from edgespec.formats.head_tensors import HEAD_HINT, eagle3_names, read_draft_ids
from edgespec.formats.heads import HeadSpec
from edgespec.formats.mlx_folder import read_json

OTHER_HEAD = "Use a head that was trained for this model, or --draft auto."


class Eagle3Network:
    """A head with weights in neutral names (formats.head_tensors.eagle3_names).

    H is the target's hidden size, h the head's, V the target's vocabulary size. A pair is a token and the features of
    the token before it.
    """

    def __init__(self, spec: HeadSpec, args: ModelArgs, weights: Mapping[str, Any], target: Any) -> None:
        """`target` is mlx-lm's model, whose embeddings and output matrix serve where the head has none of its own.

        Raises InvalidModelFile for tensors of other shapes, Unsupported for a head that the target does not fit.
        """
        self.spec = spec
        self.vocab_size, hidden_size = _measure(target)
        if hidden_size != spec.hidden_size:
            raise Unsupported(
                f"the head is for a hidden size of {spec.hidden_size:,}; the model has {hidden_size:,}.",
                hint=OTHER_HEAD,
            )
        if spec.size != hidden_size and not {"embedding", "output"} <= set(weights):
            raise Unsupported(
                f"the head has a size of {spec.size:,}, and not its own embeddings and output matrix.", hint=OTHER_HEAD
            )
        self._w = weights
        self._eps = args.rms_norm_eps
        self._attention, self._mlp = Attention(args), MLP(args)
        parts = len(spec.layers or (0,))
        _check_shapes(weights, args, parts * spec.hidden_size)
        for name in ("q", "k", "v", "o"):
            getattr(self._attention, f"{name}_proj").weight = weights[name]
        for name in ("gate", "up", "down"):
            getattr(self._mlp, f"{name}_proj").weight = weights[name]
        self._embed = _lookup(weights["embedding"]) if "embedding" in weights else find_embedding(target)
        self._output = _product(weights["output"]) if "output" in weights else find_output(target)
        self._ids = self._read_ids(weights)

    @property
    def layers(self) -> tuple[int, ...]:
        """See formats.heads.HeadSpec."""
        return self.spec.layers or ()

    @property
    def nbytes(self) -> int:
        """Of its own weights."""
        return sum(array.nbytes for array in self._w.values())

    def fuse(self, features: Any) -> Any:
        """States [n, h] that stand for the target's features [n, layers * H]."""
        features = features.astype(self._w["fc"].dtype)
        if self.spec.norm_before_fc == "all":
            features = self._norm(features, "input_norm")
        elif self.spec.norm_before_fc == "each":
            parts = mx.split(features, len(self.spec.layers or (0,)), axis=-1)
            features = mx.concatenate([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1)
        return features @ self._w["fc"].T

    def run(self, tokens: Any, states: Any, cache: KeyValues) -> Any:
        """Output [n, h] of pairs of tokens [n] and states [n, h], which follow those in `cache`."""
        normed = self._norm(states, "feature_norm")
        embedded = self._embed(tokens).astype(states.dtype)
        x = mx.concatenate([self._norm(embedded, "embedding_norm"), normed], axis=-1)[None]
        residual = normed if self.spec.norm_before_residual else states
        h = residual + self._attention(x, cache.make_mask(len(tokens)), cache)[0]
        return h + self._mlp(self._norm(h, "ffn_norm"))

    def feed_back(self, output: Any) -> Any:
        """The states [n, h] that stand for features where the target has none yet."""
        return self._norm(output, "output_norm") if self.spec.feeds_normed else output

    def score(self, output: Any) -> Any:
        """Logits [n, V] float32; -inf for tokens that the head does not know."""
        logits = self._output(self._norm(output, "output_norm")).astype(mx.float32)
        if self._ids is None:
            return logits
        whole = mx.full((logits.shape[0], self.vocab_size), -mx.inf)
        whole[:, self._ids] = logits
        return whole

    def _norm(self, x: Any, name: str) -> Any:
        return mx.fast.rms_norm(x, self._w[name], self._eps)

    def _read_ids(self, weights: Mapping[str, Any]) -> Any:
        """[draft vocabulary] the target's ids; None where the head has all of them."""
        rows = weights["output"].shape[0] if "output" in weights else self.vocab_size
        if "d2t" in weights:
            ids, _ = read_draft_ids(np.array(weights["d2t"]), self.vocab_size)
            if len(ids) == rows:
                return mx.array(ids)
        elif rows == self.vocab_size:
            return None
        raise Unsupported(
            f"the head scores {rows:,} tokens and does not name them in the vocabulary of {self.vocab_size:,}.",
            hint=OTHER_HEAD,
        )


def read_network(folder: Path, spec: HeadSpec, target: Any) -> Eagle3Network:
    """The head in a folder with config.json and safetensors, for mlx-lm's model `target`.

    Computes in the type of its weights on a GPU, and in float32 on a CPU. Raises InvalidModelFile, Unsupported,
    BackendError.
    """
    config = read_json(folder / "config.json")
    config = {**config, **(config.get("transformer_layer_config") or {}), "model_type": "llama", "num_hidden_layers": 1}
    try:
        args = ModelArgs.from_dict({**config, "attention_bias": False, "mlp_bias": False})
    except TypeError as error:
        raise InvalidModelFile(f"{folder.name}/config.json describes no layer: {error}.", hint=HEAD_HINT) from error
    arrays: dict[str, Any] = {}
    with map_errors():
        for file in sorted(folder.glob("*.safetensors")):
            arrays |= mx.load(str(file))
    weights = {neutral: arrays[name] for neutral, name in eagle3_names(arrays).items()}
    if not device().on_gpu:
        floats = {name for name, each in weights.items() if mx.issubdtype(each.dtype, mx.floating)}
        weights = {name: each.astype(mx.float32) if name in floats else each for name, each in weights.items()}
    network = Eagle3Network(spec, args, weights, target)
    with map_errors():
        mx.eval(weights)
    return network


def find_embedding(model: Any) -> Callable[[Any], Any]:
    """The token embeddings of mlx-lm's model. Raises Unsupported."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            return module  # type: ignore[no-any-return]
    raise Unsupported("this model has no embeddings that a head could share.", hint=OTHER_HEAD)


def find_output(model: Any) -> Callable[[Any], Any]:
    """The output matrix of mlx-lm's model, or its embeddings where these are tied. Raises Unsupported."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "lm_head":
            return module  # type: ignore[no-any-return]
    embedding: Any = find_embedding(model)
    return embedding.as_linear  # type: ignore[no-any-return]


def _measure(model: Any) -> tuple[int, int]:
    """Vocabulary and hidden size, of lazy arrays; nothing is computed."""
    token = mx.array([[0]], mx.int32)
    return model(token).shape[-1], find_embedding(model)(token).shape[-1]


def _lookup(weight: Any) -> Callable[[Any], Any]:
    return lambda tokens: weight[tokens]


def _product(weight: Any) -> Callable[[Any], Any]:
    return lambda x: x @ weight.T


def _check_shapes(weights: Mapping[str, Any], args: ModelArgs, width: int) -> None:
    size, inner = args.hidden_size, args.intermediate_size
    head_dim = args.head_dim or size // args.num_attention_heads
    queries, keys = args.num_attention_heads * head_dim, (args.num_key_value_heads or 1) * head_dim
    expected = {
        "fc": (size, width),
        "q": (queries, 2 * size),
        "k": (keys, 2 * size),
        "v": (keys, 2 * size),
        "o": (size, queries),
        "gate": (inner, size),
        "up": (inner, size),
        "down": (size, inner),
        **dict.fromkeys(("embedding_norm", "feature_norm", "ffn_norm", "output_norm"), (size,)),
    }
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise InvalidModelFile(
                f"The head's tensor {name} has the shape {tuple(weights[name].shape)}, not {shape}.", hint=HEAD_HINT
            )
