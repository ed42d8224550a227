"""Heads that read pairs of a token and the hidden state before it, on MLX: EAGLE and MTP."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import Features, Unsupported
from edgespec.backends.mlx.caches import ForwardContext, KeyValues, write_rows
from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary, OneMatrix, ScoringNetwork, choose_scorer
from edgespec.backends.mlx.head_parts import (
    OTHER_HEAD,
    HeadLayer,
    HeadWeights,
    LayerShape,
    TargetParts,
    read_arrays,
    read_layer_shape,
    read_target,
)
from edgespec.backends.mlx.library import map_errors, read
from edgespec.backends.mlx.scores import DeviceDraft, MlxScores
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.sequence import shared_prefix
from edgespec.core.protocols import CheckCancelled, Draft
from edgespec.core.sampling import Logits
from edgespec.core.scores import Scores
from edgespec.errors import BackendError
from edgespec.formats.head_tensors import eagle3_names, eagle_names, mtp_names, read_draft_ids
from edgespec.formats.heads import HeadSpec

_CHUNK = 512  # pairs that are read in one forward


class PairNetwork(ScoringNetwork, Protocol):
    """A head with one state a pair. h is its size, V the target's vocabulary size."""

    @property
    def depth(self) -> int:
        """Layers, each with keys and values."""

    def fuse(self, features: Any) -> Any:
        """States [n, h] that stand for the target's features [n, width]."""

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        """Output [n, h] of pairs of tokens [n] and states [n, h], which follow those in `caches`, one a layer."""

    def feed_back(self, output: Any) -> Any:
        """The states [n, h] that stand for features where the target has none yet."""

    def score(self, output: Any) -> Any:
        """Logits [n, V] float32; -inf for tokens that the head does not know."""


class PairCache:
    """Keys and values of pairs, from position `first` on; pair p is token p + 1 with the target's features of token p.

    Keeps what the network has made of the features, a state [h] a position, so that a text may be continued from
    anywhere with other tokens: features are freed once they were read.
    """

    def __init__(self, network: PairNetwork, features: Features[Any]) -> None:
        self._network = network
        self._features = features
        self.restart(0)

    def restart(self, first: int) -> None:
        """Hold nothing, and begin at `first`."""
        self.first = self.held = self._n_states = first
        self._states: Any = None
        self._keys = [KeyValues(ForwardContext()) for _ in range(self._network.depth)]

    def trim(self, held: int, known_tokens: int) -> None:
        """Drop provisional pairs, pairs from `held` on, and the states of tokens from `known_tokens` on."""
        if held < self.first:
            self.restart(max(held, 0))
            return
        self.held = min(self.held, held)
        self._n_states = min(self._n_states, known_tokens)
        for keys in self._keys:
            keys.trim_to(self.held - self.first)

    def can_read(self) -> bool:
        """Whether there are features or states from the first pair that is not held."""
        return self.held < self._n_states or self._features.start <= self.held

    def read(self, tokens: Sequence[int]) -> Any:
        """The output [n, h] of the next pairs, whose tokens are these [n]."""
        start, end = self.held, self.held + len(tokens)
        if end > self._n_states:
            fused = self._network.fuse(self._features.take(self._n_states, end))
            self._states = write_rows(self._states, self._n_states - self.first, fused)
            self._n_states = end
            self._features.release(end)
        states = self._states[start - self.first : end - self.first]
        output = self._network.run(mx.array(list(tokens)), states, self._keys)
        mx.async_eval(output, self._states)
        self.held = end
        return output

    def run_provisional(self, token: Any, output: Any) -> Any:
        """The output [1, h] of a pair of `token` [1] with the head's own `output` [1, h] before it."""
        output = self._network.run(token, self._network.feed_back(output), self._keys)
        mx.async_eval(output)
        return output


def roll_out(score: Callable[[], Any], follow: Callable[[Any], None], n: int) -> tuple[Draft, Scores]:
    """The chain of `n` best tokens, at least one, and their scores; nothing waits for the device.

    `score` gives the scores [1, V] after the last token, `follow` runs the next one, an array [1].
    """
    rows = [score()]
    best = [mx.argmax(rows[0], axis=-1)]
    while len(best) < n:
        follow(best[-1])
        rows.append(score())
        best.append(mx.argmax(rows[-1], axis=-1))
    chain = DeviceDraft(mx.concatenate(best))
    scores = mx.concatenate(rows)
    mx.async_eval(chain.array, scores)
    return chain, MlxScores(scores, draft=chain)


class PairSession:
    """A DraftSession. Drafted tokens are read again, with the target's features, once the target has accepted them."""

    is_async = True

    def __init__(
        self, network: PairNetwork, target: MlxSession, features: Features[Any], check: CheckCancelled
    ) -> None:
        """`features` are those of `target`, whose tap ends with this session."""
        self._network = self._scorer = network
        self._target = target
        self._features = features
        self._pairs = PairCache(network, features)
        self._context_size = target.capabilities.context_size
        self._check = check
        self._text: list[int] = []  # the `_base` tokens that were read, then the drafted ones
        self._base = 0
        self._output: Any = None  # [1, h] of the last pair

    @property
    def text(self) -> Sequence[int]:
        return self._text

    def begin(self, text: Sequence[int]) -> None:
        """Keeps the pairs of the prefix that `text` shares with the last one."""
        self._base = shared_prefix(self._text[: self._base], text, len(text))
        self._settle(text)

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Pairs of `text` that a read computes: those that are not in the cache, the last one always."""
        self._settle(text)
        return min(len(text) - 1, max(1, len(text) - 1 - self._pairs.held))

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """As core.drafter.DraftSession. None for a text of one token, and at the end of the context."""
        if not self._read(text, window):
            return None
        return self._host_scores()

    def step(self, token: int) -> Logits | None:
        if len(self._text) >= self._context_size:
            return None
        with map_errors():
            self._continue(mx.array([token]))
        self._text.append(token)
        return self._host_scores()

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        if not self._read(text, window):
            return None
        with map_errors():
            return roll_out(self._score, self._continue, min(n, self._context_size - len(text) + 1))

    def close(self) -> None:
        self._target.untap()
        self._pairs.restart(0)
        self._output = None
        mx.clear_cache()

    def _settle(self, text: Sequence[int]) -> None:
        """Forget drafted tokens, and what belongs to other tokens than those of `text`."""
        self._base = min(self._base, len(text))
        del self._text[self._base :]
        self._pairs.trim(self._base - 1, self._base)

    def _read(self, text: Sequence[int], window: int) -> bool:
        """Read the pairs of `text`; False where there are none, or no room. Raises BackendError, Cancelled."""
        self._settle(text)
        self._scorer = choose_scorer(self._network, text)
        pairs, last = self._pairs, len(text) - 1
        if not 0 < last < self._context_size:
            return False
        if self._features.end < last:
            raise BackendError("the head has no hidden states of the text.", hint="Report this as a bug.")
        if pairs.held == last:  # read before: its last pair runs again, for its output
            pairs.trim(last - 1, len(text))
        if last - pairs.held > max(window, 1) or not pairs.can_read():
            self._text, self._base = [], 0
            pairs.restart(max(self._features.start, last - max(window, 1)))
        if pairs.held >= last:
            return False
        with map_errors():
            while pairs.held < last:
                self._check()
                end = min(pairs.held + _CHUNK, last)
                self._output = pairs.read(text[pairs.held + 1 : end + 1])[-1:]
                self._text += text[len(self._text) : end + 1]
                self._base = end + 1
        return True

    def _continue(self, token: Any) -> None:
        """Run a drafted `token` [1]."""
        self._output = self._pairs.run_provisional(token, self._output)

    def _score(self) -> Any:
        """Scores [1, V] after the last token."""
        return self._scorer.score(self._output)

    def _host_scores(self) -> Logits:
        logits: Logits = read(self._score())[0][0]
        return logits


# The network of an EAGLE-1 or EAGLE-2 head (Li et al. 2024, arXiv:2401.15077): it continues hidden states.


class EagleNetwork(OneMatrix):
    """Predicts the target's last hidden states, which the target's output matrix scores.

    H is the hidden size of both. A pair is a token and the state of the token before it.
    """

    def __init__(self, spec: HeadSpec, shape: LayerShape, weights: HeadWeights, target: TargetParts) -> None:
        """Raises InvalidModelFile for tensors of other shapes, Unsupported for a head that the target does not fit."""
        target.check(spec)
        self.layers, size = spec.layers or (), target.hidden_size
        self._eps = shape.eps
        self._fc = weights.linear("fc", size, 2 * size)
        self._embed = target.find_embedding(weights, size)
        self._output = target.find_output(weights, size)
        self.vocabulary = DraftVocabulary(None, target.vocab_size)
        self._norms: list[Any] = [None]
        self._layers = [HeadLayer(weights, shape, size, "0.")]
        while f"{len(self._layers)}.q" in weights:
            prefix = f"{len(self._layers)}."
            self._norms.append(weights.vector(f"{prefix}attention_norm", size))
            self._layers.append(HeadLayer(weights, shape, size, prefix))
        weights.load()
        self.nbytes, self._dtype = weights.nbytes, weights.dtype

    @property
    def depth(self) -> int:
        """See PairNetwork."""
        return len(self._layers)

    def fuse(self, features: Any) -> Any:
        """See PairNetwork."""
        return features.astype(self._dtype)

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        """See PairNetwork."""
        h = self._fc(mx.concatenate([self._embed(tokens).astype(states.dtype), states], axis=-1))
        for layer, norm, cache in zip(self._layers, self._norms, caches, strict=True):
            h = h + layer.attend(h if norm is None else mx.fast.rms_norm(h, norm, self._eps), cache)
            h = h + layer.feed_forward(h)
        return h

    def feed_back(self, output: Any) -> Any:
        """See PairNetwork."""
        return output

    def score(self, output: Any) -> Any:
        """See PairNetwork."""
        return self.vocabulary.spread(self._output(output).astype(mx.float32))


def read_eagle(folder: Path, spec: HeadSpec, target: Any) -> EagleNetwork:
    """The head in a folder with config.json and safetensors, or the pickle of a release, for mlx-lm's model `target`.

    Raises InvalidModelFile, Unsupported, CacheError, BackendError.
    """
    arrays = read_arrays(folder)
    weights = HeadWeights(arrays, eagle_names(arrays))
    return EagleNetwork(spec, read_layer_shape(folder), weights, read_target(target))


# The network of an EAGLE-3 head (Li et al. 2025): one layer over the target's hidden states and the next token.


class Eagle3Network(OneMatrix):
    """A head with weights in neutral names (formats.head_tensors.eagle3_names).

    H is the target's hidden size, h the head's, V the target's vocabulary size. A pair is a token and the features of
    the token before it.
    """

    depth = 1

    def __init__(self, spec: HeadSpec, shape: LayerShape, weights: HeadWeights, target: TargetParts) -> None:
        """Embeddings and output matrix are those of `target` where the head has none of its own.

        Raises InvalidModelFile for tensors of other shapes, Unsupported for a head that the target does not fit.
        """
        target.check(spec)
        if spec.size != target.hidden_size and not ("embedding" in weights and "output" in weights):
            raise Unsupported(
                f"the head has a size of {spec.size:,}, and not its own embeddings and output matrix.", hint=OTHER_HEAD
            )
        self.spec = spec
        self._eps = shape.eps
        self._fc = weights.linear("fc", spec.size, len(spec.layers or (0,)) * spec.hidden_size)
        sizes = dict.fromkeys(("embedding_norm", "feature_norm", "output_norm"), spec.size)
        if spec.norm_before_fc == "all":
            sizes["input_norm"] = len(spec.layers or (0,)) * spec.hidden_size
        elif spec.norm_before_fc == "each":
            sizes |= {f"fc_norm.{i}": spec.hidden_size for i in range(len(self.layers))}
        self._norms = {name: weights.vector(name, size) for name, size in sizes.items()}
        self._layer = HeadLayer(weights, shape, 2 * spec.size)
        self._embed = target.find_embedding(weights, spec.size)
        self.vocabulary, self._output = _read_output(spec, weights, target)
        weights.load()
        self.nbytes, self._dtype = weights.nbytes, weights.dtype

    @property
    def layers(self) -> tuple[int, ...]:
        """See formats.heads.HeadSpec."""
        return self.spec.layers or ()

    def fuse(self, features: Any) -> Any:
        """States [n, h] that stand for the target's features [n, layers * H]."""
        features = features.astype(self._dtype)
        if self.spec.norm_before_fc == "all":
            features = self._norm(features, "input_norm")
        elif self.spec.norm_before_fc == "each":
            parts = mx.split(features, len(self.layers), axis=-1)
            features = mx.concatenate([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1)
        return self._fc(features)

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        """See PairNetwork."""
        normed = self._norm(states, "feature_norm")
        embedded = self._embed(tokens).astype(states.dtype)
        x = mx.concatenate([self._norm(embedded, "embedding_norm"), normed], axis=-1)
        h = (normed if self.spec.norm_before_residual else states) + self._layer.attend(x, caches[0])
        return h + self._layer.feed_forward(h)

    def feed_back(self, output: Any) -> Any:
        """See PairNetwork."""
        return self._norm(output, "output_norm") if self.spec.feeds_normed else output

    def score(self, output: Any) -> Any:
        """See PairNetwork."""
        return self.vocabulary.spread(self._output(self._norm(output, "output_norm")).astype(mx.float32))

    def _norm(self, x: Any, name: str) -> Any:
        return mx.fast.rms_norm(x, self._norms[name], self._eps)


def read_eagle3(folder: Path, spec: HeadSpec, target: Any) -> Eagle3Network:
    """The head in a folder with config.json and safetensors, for mlx-lm's model `target`.

    Raises InvalidModelFile, Unsupported, CacheError, BackendError.
    """
    arrays = read_arrays(folder)
    weights = HeadWeights(arrays, eagle3_names(arrays))
    return Eagle3Network(spec, read_layer_shape(folder), weights, read_target(target))


def _read_output(
    spec: HeadSpec, weights: HeadWeights, target: TargetParts
) -> tuple[DraftVocabulary, Callable[[Any], Any]]:
    """The tokens that the head scores; the output matrix."""
    rows = weights.rows("output") if "output" in weights else target.vocab_size
    if "d2t" in weights:
        ids, _ = read_draft_ids(np.array(weights.table("d2t")), target.vocab_size)
        if len(ids) == rows:
            output = weights.linear("output", rows, spec.size) if "output" in weights else target.score
            return DraftVocabulary(mx.array(ids), target.vocab_size), output
    elif rows == target.vocab_size:
        return DraftVocabulary(None, target.vocab_size), target.find_output(weights, spec.size)
    raise Unsupported(
        f"the head scores {rows:,} tokens and does not name them in the vocabulary of {target.vocab_size:,}.",
        hint=OTHER_HEAD,
    )


# The network of an MTP layer, which a target was trained with (DeepSeek-V3, arXiv:2412.19437, section 2.2).


_OUTER_NORMS = ("embedding_norm", "feature_norm", "output_norm")
_LAYER_NORMS = ("attention_norm", "ffn_norm", "q_norm", "k_norm")
_EXPERT = re.compile(  # of the layer, not of the target
    r"(?P<mlp>(?:.*\bmtp\.)?layers\.0\.mlp\.)experts\.(?:(?P<index>\d+)\.)?(?P<part>\w+_proj)(?:\.weight)?$"
)
_PLAIN_MEAN = 0.5  # means of weights are near 1, or near 0 where a file holds them less 1


class MtpNetwork(OneMatrix):
    """Joins a token's embedding with the last hidden state before it, and runs one layer of the target's kind.

    H is the hidden size of both. A pair is a token and the state of the token before it.
    """

    depth = 1

    def __init__(
        self, spec: HeadSpec, shape: LayerShape, weights: HeadWeights, shifts: Mapping[str, float], target: TargetParts
    ) -> None:
        """`shifts` are added to the weights of norms.

        Raises InvalidModelFile for tensors of other shapes, Unsupported for a head that the target does not fit.
        """
        target.check(spec)
        self.layers, size = spec.layers or (), target.hidden_size
        self._eps, self._feeds_normed = shape.eps, spec.feeds_normed
        self._fc = weights.linear("fc", size, 2 * size)
        self._norms = {name: weights.vector(name, size, shifts[name]) for name in (*_OUTER_NORMS, "attention_norm")}
        self._layer = HeadLayer(weights, shape, size, shift=shifts["ffn_norm"])
        self._embed = target.find_embedding(weights, size)
        self._output = target.find_output(weights, size)
        self.vocabulary = DraftVocabulary(None, target.vocab_size)
        weights.load()
        self.nbytes, self._dtype = weights.nbytes, weights.dtype

    def fuse(self, features: Any) -> Any:
        """See PairNetwork."""
        return features.astype(self._dtype)

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        """See PairNetwork."""
        embedded = self._embed(tokens).astype(states.dtype)
        parts = [self._norm(embedded, "embedding_norm"), self._norm(states, "feature_norm")]
        h = self._fc(mx.concatenate(parts, axis=-1))
        h = h + self._layer.attend(self._norm(h, "attention_norm"), caches[0])
        return h + self._layer.feed_forward(h)

    def feed_back(self, output: Any) -> Any:
        """See PairNetwork."""
        return self._norm(output, "output_norm") if self._feeds_normed else output

    def score(self, output: Any) -> Any:
        """See PairNetwork."""
        return self.vocabulary.spread(self._output(self._norm(output, "output_norm")).astype(mx.float32))

    def _norm(self, x: Any, name: str) -> Any:
        return mx.fast.rms_norm(x, self._norms[name], self._eps)


def read_mtp(folder: Path, spec: HeadSpec, target: Any) -> MtpNetwork:
    """The head in a folder with config.json and safetensors, which may be the target's, for mlx-lm's model `target`.

    Raises InvalidModelFile, Unsupported, CacheError, BackendError.
    """
    arrays = _stack_experts(read_arrays(folder))
    names = mtp_names(arrays)
    weights = HeadWeights(arrays, names)
    return MtpNetwork(spec, read_layer_shape(folder), weights, find_shifts(weights, names), read_target(target))


def _stack_experts(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """With the matrices of all experts of the MTP layer in one array, as mlx-lm has them in its own folders.

    Original files have one for each expert, or one for all with those for gate and up behind each other.
    """
    found = {name: each for name, each in arrays.items() if not _EXPERT.match(name)}
    groups: dict[str, dict[int, Any]] = {}
    for name, each in arrays.items():
        if not (match := _EXPERT.match(name)):
            continue
        stem = f"{match['mlp']}switch_mlp."
        if match["index"]:
            groups.setdefault(f"{stem}{match['part']}.weight", {})[int(match["index"])] = each
        elif match["part"] == "gate_up_proj":
            halves = mx.split(each, 2, axis=1)
            found |= {f"{stem}{part}_proj.weight": half for part, half in zip(("gate", "up"), halves, strict=True)}
        else:
            found[f"{stem}{match['part']}.weight"] = each
    return found | {name: mx.stack([group[i] for i in sorted(group)]) for name, group in groups.items()}


def find_shifts(weights: HeadWeights, names: Mapping[str, str]) -> dict[str, float]:
    """What is to be added to the weights of each norm, by neutral name; `names` are those of `mtp_names`.

    Original files with Qwen's names hold them less 1. Some converters add 1 to all, some to those of the layer alone,
    some to the last one. The two norms before `fc` have true means of 0.3 to 0.5, so their size does not tell; but a
    mean below 0 does.
    """
    if names["fc"].endswith("eh_proj.weight"):  # DeepSeek's names
        return dict.fromkeys((*_OUTER_NORMS, *_LAYER_NORMS), 0.0)
    layer = [weights.mean(name) for name in _LAYER_NORMS if name in weights]
    is_short = sum(layer) < _PLAIN_MEAN * len(layer)
    shifts = dict.fromkeys(_LAYER_NORMS, float(is_short))
    shifts["output_norm"] = float(weights.mean("output_norm") < _PLAIN_MEAN)
    for name in ("embedding_norm", "feature_norm"):
        shifts[name] = float(is_short or weights.mean(name) < 0)
    return shifts
