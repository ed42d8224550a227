"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): each guesses a later token from the target's state."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edgespec.backends.attached_draft import Features
from edgespec.backends.mlx.caches import KeyValues
from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary, ShortVocabulary, choose_scorer, take_rows
from edgespec.backends.mlx.head_parts import (
    HeadLayer,
    HeadWeights,
    LayerShape,
    TargetParts,
    read_arrays,
    read_layer_shape,
    read_target,
)
from edgespec.backends.mlx.library import map_errors, read
from edgespec.backends.mlx.pair_heads import PairSession
from edgespec.backends.mlx.session import MlxSession
from edgespec.core.protocols import CheckCancelled, Draft
from edgespec.core.sampling import Logits
from edgespec.core.scores import Scores
from edgespec.errors import BackendError, InvalidModelFile
from edgespec.formats.head_tensors import HEAD_HINT
from edgespec.formats.heads import HeadSpec

# HEAD.LAYER.linear.weight of a residual block, HEAD.LAYER.weight of an output matrix behind the blocks
_NAME = re.compile(r"(?:medusa_heads?\.)?(\d+\.\d+\.(?:linear\.)?weight)")


class MedusaNetwork:
    """Independent heads over one state. H is the target's hidden size, V its vocabulary size."""

    layers = ()
    short: ShortVocabulary | None = None

    def __init__(self, weights: HeadWeights, n_blocks: Sequence[int], target: TargetParts) -> None:
        """`n_blocks` are the residual blocks of each head. A head without an output matrix uses the target's.

        Raises InvalidModelFile for tensors of other shapes, Unsupported for heads of another vocabulary.
        """
        self._weights = weights
        size = target.hidden_size
        self.vocabulary = DraftVocabulary(None, target.vocab_size)
        self._blocks = [
            [weights.linear(f"{head}.{block}.linear.weight", size, size) for block in range(count)]
            for head, count in enumerate(n_blocks)
        ]
        self._outputs = [
            target.find_output(weights, size, f"{head}.{count}.weight") for head, count in enumerate(n_blocks)
        ]
        weights.load()

    @property
    def nbytes(self) -> int:
        """Of its own weights."""
        return self._weights.nbytes

    @property
    def n_heads(self) -> int:
        return len(self._blocks)

    def score(self, state: Any, n: int) -> Any:
        """Logits [n, V] float32 of the first `n` heads for a state [1, H]."""
        rows = [_transform(blocks, state) for blocks in self._blocks[:n]]
        outputs = self._outputs[: len(rows)]
        if all(output is outputs[0] for output in outputs):
            return self.vocabulary.spread(outputs[0](mx.concatenate(rows)).astype(mx.float32))
        scored = [output(row) for output, row in zip(outputs, rows, strict=True)]
        return self.vocabulary.spread(mx.concatenate(scored).astype(mx.float32))

    def shorten(self, ids: Any) -> MedusaNetwork:
        """See ScoringNetwork."""
        short = copy.copy(self)
        taken = {id(output): output for output in self._outputs}  # which heads may share
        taken = {key: take_rows(output, ids) for key, output in taken.items()}
        short._outputs = [taken[id(output)] for output in self._outputs]
        short.vocabulary = DraftVocabulary(ids, self.vocabulary.vocab_size)
        return short


class MedusaSession:
    """A BlockSession without a cache: it reads the state of the token before the root."""

    def __init__(
        self, network: MedusaNetwork, target: MlxSession, features: Features[Any], check: CheckCancelled
    ) -> None:
        """`features` are those of `target`, whose tap ends with this session."""
        self.block_size = network.n_heads
        self._network = network
        self._target = target
        self._features = features
        self._check = check

    def begin(self, text: Sequence[int]) -> None:
        """Nothing is cached."""

    def pending_tokens(self, text: Sequence[int]) -> int:
        """1: a block reads one state."""
        return min(1, len(text) - 1)

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        """As core.drafter.BlockSession. None for a text of one token. Raises BackendError, Cancelled."""
        position, features = len(text) - 2, self._features
        if features.end <= position:
            raise BackendError("the heads have no hidden state of the text.", hint="Report this as a bug.")
        if position < features.start:
            return None
        self._check()
        features.release(position)
        with map_errors():
            scorer = choose_scorer(self._network, text)
            scores = scorer.score(features.take(position, position + 1), n)
        return list(read(scores)[0])

    def close(self) -> None:
        self._target.untap()
        mx.clear_cache()


def read_medusa(folder: Path, spec: HeadSpec, model: Any) -> MedusaNetwork:
    """The heads in a folder with safetensors or a pickle, for mlx-lm's `model`.

    Raises InvalidModelFile, Unsupported, BackendError, CacheError.
    """
    target = read_target(model)
    target.check(spec)
    arrays = read_arrays(folder)
    names = {found[1]: name for name in arrays if (found := _NAME.fullmatch(name))}
    return MedusaNetwork(HeadWeights(arrays, names), _count_medusa_blocks(names), target)


def _transform(blocks: Sequence[Any], state: Any) -> Any:
    """[1, H] what the output matrix multiplies."""
    for linear in blocks:
        state = state + nn.silu(linear(state))
    return state


def _count_medusa_blocks(names: Mapping[str, str]) -> list[int]:
    """The residual blocks of each head. Raises InvalidModelFile where a head or a block is missing."""
    found = {tuple(map(int, name.split(".")[:2])) for name in names if name.endswith("linear.weight")}
    counts = Counter(head for head, _ in found)
    n_blocks = [counts[head] for head in range(len(counts))]
    if not found or found != {(head, block) for head, count in enumerate(n_blocks) for block in range(count)}:
        raise InvalidModelFile("The file lacks residual blocks of its Medusa heads.", hint=HEAD_HINT)
    return n_blocks


# Hydra and Hydra++ heads (Ankner et al. 2024, arXiv:2402.05109): each reads what those before it drafted.


_PREFIX = "prefix_embeding_layer."
_PREFIX_NAMES = {
    **{name: f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "attention_norm": "layers.0.input_layernorm.weight",
    "ffn_norm": "layers.0.post_attention_layernorm.weight",
    "prefix_norm": "norm.weight",
}
_MATRIX = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.weight")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?weight")
# What the prefix layer has of its target where config.json does not say
_SETTINGS = ("num_attention_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings")


class HydraNetwork:
    """A PairNetwork. The state of a pair is the target's last hidden state, of Hydra++ after a layer over all of them.

    H is the target's hidden size. An output [1, k H] is a state, the embedding of its pair's token and those of the
    k - 2 tokens that were drafted after it: the input of head k - 2, counted from 0.
    """

    layers = ()
    short: ShortVocabulary | None = None

    def __init__(
        self, n_blocks: Sequence[int], weights: HeadWeights, target: TargetParts, shape: LayerShape | None
    ) -> None:
        """`n_blocks` are the residual blocks of each head; `shape` is that of the layer of Hydra++.

        Raises InvalidModelFile for tensors of other shapes, Unsupported for heads of another vocabulary.
        """
        size = self._size = target.hidden_size
        self._embed = target.embed
        self.vocabulary = DraftVocabulary(None, target.vocab_size)
        self._prefix = None if shape is None else _Prefix(weights, shape)
        self._heads = []
        for head, count in enumerate(n_blocks):
            width = (2 + head) * size
            residual, first = (weights.linear(f"{head}.{name}", size, width) for name in ("residual", "0"))
            more = [weights.linear(f"{head}.{block}", size, size) for block in range(1, count)]
            self._heads.append((residual, first, more, target.find_output(weights, size, f"{head}.output")))
        weights.load()
        self.nbytes, self._dtype = weights.nbytes, weights.dtype

    @property
    def n_heads(self) -> int:
        return len(self._heads)

    @property
    def depth(self) -> int:
        """See PairNetwork."""
        return int(self._prefix is not None)

    def fuse(self, features: Any) -> Any:
        """See PairNetwork."""
        return features.astype(self._dtype)

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        """Output [n, width + H] of tokens [n] and states [n, width]: the target's, or an earlier output."""
        embedded = self._embed(tokens).astype(states.dtype)
        if self._prefix is not None and states.shape[-1] == self._size:
            states = self._prefix.run(states, caches[0])
        return mx.concatenate([states, embedded], axis=-1)

    def feed_back(self, output: Any) -> Any:
        """See PairNetwork."""
        return output

    def score(self, output: Any) -> Any:
        """Logits [n, V] float32 of the head that reads so many embeddings."""
        residual, first, more, score = self._heads[output.shape[-1] // self._size - 2]
        x = residual(output) + nn.silu(first(output))
        for linear in more:
            x = x + nn.silu(linear(x))
        return self.vocabulary.spread(score(x).astype(mx.float32))

    def shorten(self, ids: Any) -> HydraNetwork:
        """See ScoringNetwork."""
        short = copy.copy(self)
        short._heads = [(*others, take_rows(score, ids)) for *others, score in self._heads]
        short.vocabulary = DraftVocabulary(ids, self.vocabulary.vocab_size)
        return short


class _Prefix:
    """The layer of Hydra++, and the norm behind it."""

    def __init__(self, weights: HeadWeights, shape: LayerShape) -> None:
        self._layer = HeadLayer(weights, shape, shape.size)
        self._eps = shape.eps
        self._norms = [weights.vector(name, shape.size) for name in ("attention_norm", "prefix_norm")]

    def run(self, states: Any, cache: KeyValues) -> Any:
        """[n, H] of states [n, H], which follow those in `cache`."""
        h = states + self._layer.attend(mx.fast.rms_norm(states, self._norms[0], self._eps), cache)
        return mx.fast.rms_norm(h + self._layer.feed_forward(h), self._norms[1], self._eps)


class HydraSession(PairSession):
    """A DraftSession that ends behind the last head."""

    def __init__(
        self, network: HydraNetwork, target: MlxSession, features: Features[Any], check: CheckCancelled
    ) -> None:
        """`features` are those of `target`, whose tap ends with this session."""
        super().__init__(network, target, features, check)
        self._n_heads = network.n_heads

    def step(self, token: int) -> Logits | None:
        """As core.drafter.DraftSession. None after the last head too."""
        return None if len(self._text) - self._base >= self._n_heads - 1 else super().step(token)

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        """As core.drafter.DraftSession; at most a token a head."""
        return super().rollout(text, window, min(n, self._n_heads))


def read_hydra(folder: Path, spec: HeadSpec, model: Any) -> HydraNetwork:
    """The heads in a folder with safetensors or a pickle, for mlx-lm's `model`.

    Raises InvalidModelFile, Unsupported, BackendError, CacheError.
    """
    target = read_target(model)
    target.check(spec)
    arrays = read_arrays(folder)
    names = dict(_find_names(arrays))
    n_blocks = _count_hydra_blocks(names)
    shape = None
    if any(name.startswith(_PREFIX) for name in arrays):
        names |= {neutral: _PREFIX + name for neutral, name in _PREFIX_NAMES.items()}
        _require(names, arrays)
        shape = read_layer_shape(folder, _find_settings(model, arrays, target.hidden_size))
    return HydraNetwork(n_blocks, HeadWeights(arrays, names), target, shape)


def _find_names(arrays: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(neutral name, the file's own) of matrices: HEAD.BLOCK, HEAD.residual of the first block, HEAD.output.

    Layers without weights lie between the blocks of Hydra++, so that its blocks are not numbered in steps of one.
    """
    found = [(match, name) for name in arrays if (match := _MATRIX.fullmatch(name))]
    blocks = sorted((int(match[1]), int(match[2]), name) for match, name in found if match[3] == "linear")
    for head, block, name in blocks:
        yield f"{head}.{sum(each[0] == head and each[1] < block for each in blocks)}", name
    for match, name in found:
        if match[3] == "res_connection":
            yield f"{match[1]}.residual", name
    for name in arrays:
        if output := _OUTPUT.fullmatch(name):
            yield f"{output[1]}.output", name


def _count_hydra_blocks(names: Mapping[str, str]) -> list[int]:
    """The residual blocks of each head. Raises InvalidModelFile where one is missing."""
    found = [name.split(".") for name in names]
    n_blocks: list[int] = []
    while count := sum(head == str(len(n_blocks)) and part.isdigit() for head, part in found):
        n_blocks.append(count)
    heads = {str(head) for head in range(len(n_blocks))}
    if not n_blocks or {head for head, _ in found} != heads or any(f"{head}.residual" not in names for head in heads):
        raise InvalidModelFile("The file lacks blocks of Hydra heads that read the tokens before.", hint=HEAD_HINT)
    return n_blocks


def _require(names: Mapping[str, str], arrays: Mapping[str, Any]) -> None:
    if missing := [name for name in names.values() if name not in arrays]:
        raise InvalidModelFile(f"The Hydra++ head lacks the tensor {missing[0]}.", hint=HEAD_HINT)


def _find_settings(model: Any, arrays: Mapping[str, Any], size: int) -> dict[str, Any]:
    """What the prefix layer has where config.json does not say: the target's attention, and sizes of its tensors."""
    settings = {key: getattr(getattr(model, "args", None), key, None) for key in _SETTINGS}
    settings |= {"hidden_size": size, "intermediate_size": arrays[_PREFIX + _PREFIX_NAMES["gate"]].shape[0]}
    queries, keys = (arrays[_PREFIX + _PREFIX_NAMES[name]].shape[0] for name in "qk")
    if heads := settings["num_attention_heads"]:
        width = max(queries // heads, 1)
        settings |= {"head_dim": width, "num_key_value_heads": max(keys // width, 1)}
    return {key: value for key, value in settings.items() if value is not None}
