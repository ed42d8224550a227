"""DFlash heads on MLX: several tokens in one forward over the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import Features, Unsupported
from edgespec.backends.mlx.caches import ForwardContext, KeyValues
from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary, OneMatrix, choose_scorer, take_rows
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
from edgespec.errors import BackendError, InvalidModelFile
from edgespec.formats.head_tensors import HEAD_HINT, dflash_names, read_draft_ids
from edgespec.formats.heads import HeadSpec
from edgespec.formats.mlx_folder import read_json

# The network of DFlash heads: layers that fill a block of masks in one forward over the target's hidden states.


_MAX_BLOCK = 64  # positions; the target scores no more rows in one forward
_PLAIN: Mapping[str, tuple[object, ...]] = {  # what a config may say where nothing else is computed
    "hidden_act": ("silu",),
    "rope_is_neox_style": (True,),
    "attention_value_scale": (1,),
    "input_embedding_scale": (1,),
    "markov_head_type": ("vanilla",),
}


class BlockKeys(KeyValues):
    """Keys and values of one layer, where the rows of a block attend to each other in both directions.

    Positions before a window are kept, and masked.
    """

    def __init__(self, window: int | None, *, is_causal: bool) -> None:
        super().__init__(ForwardContext())
        self._reach = window
        self._is_causal = is_causal

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """[N, length + N] what the N rows of a block attend to; None for everything."""
        end = self.length + N
        if not self._is_causal and (self._reach is None or end <= self._reach):
            return None
        rows, keys = mx.arange(self.length, end)[:, None], mx.arange(end)[None]
        mask = keys <= rows if self._is_causal else mx.ones((N, end), mx.bool_)
        return mask if self._reach is None else mask & (rows - keys < self._reach)


class BlockLayer(HeadLayer):
    """A layer that reads hidden states as keys and values, and a block as rows."""

    def __init__(self, weights: HeadWeights, shape: LayerShape, index: int) -> None:
        """Raises InvalidModelFile for tensors of other shapes."""
        super().__init__(weights, shape, shape.size, f"{index}.")
        self._attention_norm = weights.vector(f"{index}.attention_norm", shape.size)

    def inject(self, z: Any, cache: KeyValues) -> None:
        """Append the keys and values of fused hidden states `z` [n, size] to `cache`."""
        split = 1, len(z), self._shape.kv_heads, -1
        keys = self._rotate(self._norm(self._k(z).reshape(split), "k_norm"), cache.offset)
        cache.update_and_fetch(keys, self._v(z).reshape(split).transpose(0, 2, 1, 3))

    def run(self, x: Any, cache: KeyValues) -> Any:
        """[n, size] of the rows [n, size] of a block, which follow those in `cache`."""
        x = x + self.attend(mx.fast.rms_norm(x, self._attention_norm, self._shape.eps), cache)
        return x + self.feed_forward(x)


@dataclass(frozen=True, slots=True)
class Block:
    """What is run after the root.

    n_rows      the root and masks
    first_row   that predicts, the token after the root: 0 or 1
    mask_token  the id of a mask
    windows     [layers] the positions that a row attends to; None for all
    is_causal   whether a row attends to none of the later ones
    """

    n_rows: int
    first_row: int
    mask_token: int
    windows: Sequence[int | None]
    is_causal: bool

    @property
    def n_drafts(self) -> int:
        """The tokens that a block drafts."""
        return self.n_rows - self.first_row


class DFlashNetwork(OneMatrix):
    """A head beside its target, whose embeddings and output matrix serve where it has none of its own.

    H is the hidden size of both, V the target's vocabulary size, W the draft's.
    """

    def __init__(self, spec: HeadSpec, folder: Path, target: TargetParts) -> None:
        """Reads a folder with config.json and safetensors.

        Raises InvalidModelFile, CacheError, BackendError; Unsupported for a head that the target does not fit.
        """
        target.check(spec)
        self.layers = spec.layers or ()
        arrays = read_arrays(folder)
        weights, shape, size = HeadWeights(arrays, dflash_names(arrays)), read_layer_shape(folder), target.hidden_size
        self._eps = shape.eps
        self._fc = weights.linear("fc", size, len(self.layers) * size)
        self._norms = [weights.vector(name, size) for name in ("feature_norm", "output_norm")]
        count = next(i for i in range(len(arrays)) if f"{i}.q" not in weights)
        self._layers = [BlockLayer(weights, shape, i) for i in range(count)]
        self.block = _read_block(spec, folder, target.vocab_size, count)
        self.vocabulary = _read_vocabulary(weights, target.vocab_size)
        self._embed = target.find_embedding(weights, size)
        self._output = target.score
        if "output" in weights:
            self._output = weights.linear("output", self.vocabulary.size, size)
        self._read_more(weights)
        weights.load()
        self.nbytes = weights.nbytes

    def open_caches(self) -> list[KeyValues]:
        """Keys and values of each layer, of no positions."""
        return [BlockKeys(window, is_causal=self.block.is_causal) for window in self.block.windows]

    def inject(self, features: Any, caches: list[KeyValues]) -> None:
        """Append what stands for the target's `features` [n, layers * H] to `caches`; the device starts on it."""
        z = mx.fast.rms_norm(self._fc(features.astype(self._norms[0].dtype)), self._norms[0], self._eps)
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.inject(z, cache)
        mx.async_eval([cache.state for cache in caches])

    def run_block(self, root: int, caches: list[KeyValues]) -> Any:
        """Output [n_drafts, H], normed, of the rows that predict; none is kept.

        All rows of a block run, as in training: since they attend to each other, fewer of them would say other things.
        """
        held, masks = caches[0].length, [self.block.mask_token] * (self.block.n_rows - 1)
        x = self._embed(mx.array([root, *masks], mx.int32)).astype(self._norms[0].dtype)
        try:
            for layer, cache in zip(self._layers, caches, strict=True):
                x = layer.run(x, cache)
        finally:
            for cache in caches:
                cache.trim_to(held)
        return mx.fast.rms_norm(x[self.block.first_row :], self._norms[1], self._eps)

    def score(self, output: Any) -> Any:
        """Scores [n, W] float32 of the draft's tokens."""
        return self._output(output).astype(mx.float32)

    def _read_more(self, weights: HeadWeights) -> None:
        """Take what other kinds of heads have besides."""


def read_dflash(folder: Path, spec: HeadSpec, target: Any) -> DFlashNetwork:
    """The head in a folder for mlx-lm's model `target`. Raises as DFlashNetwork."""
    return DFlashNetwork(spec, folder, read_target(target))


def _read_vocabulary(weights: HeadWeights, vocab_size: int) -> DraftVocabulary:
    """Raises InvalidModelFile, Unsupported."""
    rows, ids = weights.rows("output") if "output" in weights else vocab_size, None
    if "d2t" in weights:
        ids = mx.array(read_draft_ids(np.array(weights.table("d2t")), vocab_size)[0])
    if rows != (vocab_size if ids is None else ids.size):
        raise Unsupported(
            f"the head scores {rows:,} tokens and does not name them in the vocabulary of {vocab_size:,}.",
            hint=OTHER_HEAD,
        )
    return DraftVocabulary(ids, vocab_size)


def _read_block(spec: HeadSpec, folder: Path, vocab_size: int, count: int) -> Block:
    """Raises Unsupported for a head without masks, or with blocks that are too long; and as _read_attention."""
    if spec.mask_token is None or spec.mask_token >= vocab_size:
        named = "none" if spec.mask_token is None else f"{spec.mask_token:,} of {vocab_size:,}"
        raise Unsupported(
            f"the head fills its blocks with a token of the model, and its config.json names {named}.", hint=OTHER_HEAD
        )
    if not 2 <= spec.block_size <= _MAX_BLOCK:
        raise Unsupported(
            f"the head has blocks of {spec.block_size:,} positions; those of 2 to {_MAX_BLOCK} are run.",
            hint=OTHER_HEAD,
        )
    windows, is_causal = _read_attention(folder, count)
    return Block(spec.block_size, 0 if spec.predicts_at_root else 1, spec.mask_token, windows, is_causal)


def _read_attention(folder: Path, count: int) -> tuple[list[int | None], bool]:
    """The windows and `is_causal` of a Block with `count` layers, as config.json has them.

    A window without `use_sliding_window` or `use_swa` means nothing. Raises InvalidModelFile, CacheError; Unsupported
    for layers that compute something else.
    """
    config = read_json(folder / "config.json")
    for key in ("transformer_layer_config", "dflash_config"):
        if isinstance(table := config.get(key), dict):
            config = {**config, **table}
    for key, allowed in _PLAIN.items():
        if (value := config.get(key)) is not None and value not in allowed:
            raise Unsupported(f"no head is run whose config.json says {key} = {str(value)[:40]}.", hint=OTHER_HEAD)
    if (stated := config.get("num_hidden_layers", count)) != count:
        raise InvalidModelFile(f"The head has {count} layers, its config.json names {stated}.", hint=HEAD_HINT)
    causal = config.get("is_causal", config.get("causal")) is True
    window = config.get("swa_window_size") or config.get("sliding_window")
    everywhere, kinds = config.get("use_swa") is True, config.get("layer_types")
    if not (everywhere or config.get("use_sliding_window") is True) or type(window) is not int or window < 1:
        return [None] * count, causal
    if everywhere:
        return [window] * count, causal
    if not isinstance(kinds, list) or len(kinds) != count:
        raise InvalidModelFile("The head's config.json has a window and not a type for each layer.", hint=HEAD_HINT)
    return [window if kind == "sliding_attention" else None for kind in kinds], causal


_CHUNK = 512  # positions whose hidden states are read at once


class BlockContext:
    """Keys and values of a text's hidden states in a head's layers, which its blocks attend to.

    text  the tokens whose hidden states were read; a text continues with its root
    """

    def __init__(
        self, network: DFlashNetwork, target: MlxSession, features: Features[Any], check: CheckCancelled
    ) -> None:
        """`features` are those of `target`, whose tap ends with this context."""
        self.text: list[int] = []
        self._network = network
        self._target = target
        self._features = features
        self._context_size = target.capabilities.context_size
        self._check = check
        self._restart(0)

    def begin(self, text: Sequence[int]) -> None:
        """Keep what belongs to the prefix that `text` shares with the last one."""
        self._trim(shared_prefix(self.text, text, len(text)))

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Tokens of `text` that a block computes: those whose hidden states were not read, and the root."""
        self._trim(len(text) - 1)
        return len(text) - len(self.text)

    def read(self, text: Sequence[int], window: int) -> bool:
        """Read the hidden states of `text`, of a long unread part those of the last `window` tokens, root included.

        False for a text of one token, and at the end of the context. Raises BackendError, Cancelled.
        """
        last = len(text) - 1
        if not 0 < last < self._context_size:
            return False
        if self._features.end < last:
            raise BackendError("the head has no hidden states of the text.", hint="Report this as a bug.")
        most = max(window - 1, 1)
        if self.pending_tokens(text) - 1 > most or self._features.start > len(self.text):
            self._restart(max(self._features.start, last - most))
            self.text = list(text[: self._first])
        with map_errors():
            while (held := len(self.text)) < last:
                self._check()
                end = min(held + _CHUNK, last)
                self._network.inject(self._features.take(held, end), self._caches)
                self._features.release(end)
                self.text += text[held:end]
        return True

    def run_block(self, root: int) -> Any:
        """Output [n_drafts, size] after the text and `root`."""
        return self._network.run_block(root, self._caches)

    def close(self) -> None:
        self._target.untap()
        self._restart(0)
        mx.clear_cache()

    def _restart(self, first: int) -> None:
        """Hold nothing, and begin at position `first`."""
        self._first = first
        self._caches = self._network.open_caches()
        del self.text[first:]

    def _trim(self, position: int) -> None:
        """Forget what follows `position`."""
        if position < self._first:
            self._restart(max(position, 0))
            return
        del self.text[position:]
        for cache in self._caches:  # which hold more after a read that failed
            cache.trim_to(len(self.text) - self._first)


class DFlashSession:
    """A BlockSession (Chen et al. 2026, DFlash): row i of a block predicts the token i places after the root."""

    def __init__(
        self, network: DFlashNetwork, target: MlxSession, features: Features[Any], check: CheckCancelled
    ) -> None:
        """`features` are those of `target`, whose tap ends with this session."""
        self._network = network
        self._context = BlockContext(network, target, features, check)

    @property
    def block_size(self) -> int:
        return self._network.block.n_drafts

    def begin(self, text: Sequence[int]) -> None:
        self._context.begin(text)

    def pending_tokens(self, text: Sequence[int]) -> int:
        return self._context.pending_tokens(text)

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        """As core.drafter.BlockSession. None for a text of one token, and at the end of the context."""
        if not self._context.read(text, window):
            return None
        with map_errors():
            output = self._context.run_block(text[-1])[:n]
            scorer = choose_scorer(self._network, text)
            (rows,) = read(scorer.vocabulary.spread(scorer.score(output)))
        return list(rows)

    def close(self) -> None:
        self._context.close()


# DSpark heads on MLX: DFlash's blocks, whose tokens depend on the one before through a small matrix.


class DSparkNetwork(DFlashNetwork):
    """A DFlash network whose scores are those of a row, and of the token before the one that it predicts."""

    def follow(self, scores: Any, token: Any) -> Any:
        """Scores [1, W] of a row whose own are `scores` [1, W], after `token` [1]."""
        return scores + self._markov_2(self._markov_1(token)).astype(mx.float32)

    def shorten(self, ids: Any) -> Self:
        """See ScoringNetwork."""
        short = super().shorten(ids)
        short._markov_2 = take_rows(self._markov_2, ids)
        return short

    def _read_more(self, weights: HeadWeights) -> None:
        """The bias that a token gives to the scores of the next one: matrices [V, rank] and [W, rank]."""
        if "markov_1" not in weights or "markov_2" not in weights:
            raise InvalidModelFile("The DSpark head lacks its Markov head.", hint=HEAD_HINT)
        rank = weights.columns("markov_1")
        self._markov_1 = weights.embedding("markov_1", self.vocabulary.vocab_size, rank)
        self._markov_2 = weights.linear("markov_2", self.vocabulary.size, rank)


def read_dspark(folder: Path, spec: HeadSpec, target: Any) -> DSparkNetwork:
    """As dflash_network.read_network."""
    return DSparkNetwork(spec, folder, read_target(target))


class DSparkSession:
    """A DraftSession. One forward computes a block; each token then chooses among the next row's with its bias."""

    is_async = True

    def __init__(
        self, network: DSparkNetwork, target: MlxSession, features: Features[Any], check: CheckCancelled
    ) -> None:
        """`features` are those of `target`, whose tap ends with this session."""
        self._network = network
        self._context = BlockContext(network, target, features, check)
        self._scorer = network
        self._block: list[int] = []  # the root, and the drafted tokens after it
        self._scores: Any = None  # [n_drafts, W] of the block's rows alone

    @property
    def text(self) -> Sequence[int]:
        return [*self._context.text, *self._block]

    def begin(self, text: Sequence[int]) -> None:
        self._block = []
        self._context.begin(text)

    def pending_tokens(self, text: Sequence[int]) -> int:
        self._block = []
        return self._context.pending_tokens(text)

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """As core.drafter.DraftSession. None for a text of one token, and at the end of the context."""
        if not self._start(text, window):
            return None
        return self._follow(text[-1])

    def step(self, token: int) -> Logits | None:
        """[V] after one more token of the block; None at its end. Runs no forward."""
        if len(self._block) >= self._network.block.n_drafts:
            return None
        return self._follow(token)

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        """As core.drafter.DraftSession; `n` is at most a block."""
        if not self._start(text, window):
            return None
        with map_errors():
            rows: list[Any] = []
            best = [mx.array(text[-1:])]
            for row in range(min(n, self._network.block.n_drafts)):
                rows.append(self._scorer.vocabulary.spread(self._scorer.follow(self._scores[row : row + 1], best[-1])))
                best.append(mx.argmax(rows[-1], axis=-1))
            chain = DeviceDraft(mx.concatenate(best[1:]))
            scores = mx.concatenate(rows)
            mx.async_eval(chain.array, scores)
        return chain, MlxScores(scores, draft=chain)

    def close(self) -> None:
        self._scores = None
        self._context.close()

    def _start(self, text: Sequence[int], window: int) -> bool:
        """Run the block after `text`; False where there is none."""
        self._block = []
        if not self._context.read(text, window):
            return False
        with map_errors():
            self._scorer = choose_scorer(self._network, text)
            self._scores = self._scorer.score(self._context.run_block(text[-1]))
        return True

    def _follow(self, token: int) -> Logits:
        """[V] of the next row, after `token`."""
        row = len(self._block)
        self._block.append(token)
        with map_errors():
            scores = self._scorer.follow(self._scores[row : row + 1], mx.array([token]))
            logits: Logits = read(self._scorer.vocabulary.spread(scores))[0][0]
        return logits
