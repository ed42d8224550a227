"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): each guesses a later token from the target's state."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edgespec.backends.features import Features
from edgespec.backends.mlx.draft_vocabulary import (
    DraftVocabulary,
    ShortVocabulary,
    choose_scorer,
    take_rows,
)
from edgespec.backends.mlx.head_weights import HeadWeights, read_arrays
from edgespec.backends.mlx.library import map_errors, read
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.target_parts import TargetParts, read_target
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled
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

    def unread(self, text: Sequence[int]) -> int:
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


def read_network(folder: Path, spec: HeadSpec, model: Any) -> MedusaNetwork:
    """The heads in a folder with safetensors or a pickle, for mlx-lm's `model`.

    Raises InvalidModelFile, Unsupported, BackendError, CacheError.
    """
    target = read_target(model)
    target.check(spec)
    arrays = read_arrays(folder)
    names = {found[1]: name for name in arrays if (found := _NAME.fullmatch(name))}
    return MedusaNetwork(HeadWeights(arrays, names), _count_blocks(names), target)


def _transform(blocks: Sequence[Any], state: Any) -> Any:
    """[1, H] what the output matrix multiplies."""
    for linear in blocks:
        state = state + nn.silu(linear(state))
    return state


def _count_blocks(names: Mapping[str, str]) -> list[int]:
    """The residual blocks of each head. Raises InvalidModelFile where a head or a block is missing."""
    found = {tuple(map(int, name.split(".")[:2])) for name in names if name.endswith("linear.weight")}
    counts = Counter(head for head, _ in found)
    n_blocks = [counts[head] for head in range(len(counts))]
    if not found or found != {(head, block) for head, count in enumerate(n_blocks) for block in range(count)}:
        raise InvalidModelFile("The file lacks residual blocks of its Medusa heads.", hint=HEAD_HINT)
    return n_blocks
