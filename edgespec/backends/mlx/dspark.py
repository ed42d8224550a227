"""DSpark heads on MLX: DFlash's blocks, whose tokens depend on the one before through a small matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from edgespec.backends.features import Features
from edgespec.backends.mlx.dflash import BlockContext
from edgespec.backends.mlx.dflash_network import DFlashNetwork
from edgespec.backends.mlx.draft_vocabulary import choose_scorer, take_rows
from edgespec.backends.mlx.head_weights import HeadWeights
from edgespec.backends.mlx.lazy_draft import DeviceDraft
from edgespec.backends.mlx.library import map_errors, read
from edgespec.backends.mlx.scores import MlxScores
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.target_parts import read_target
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled, Draft
from edgespec.core.scores import Scores
from edgespec.errors import InvalidModelFile
from edgespec.formats.head_tensors import HEAD_HINT
from edgespec.formats.heads import HeadSpec


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


def read_network(folder: Path, spec: HeadSpec, target: Any) -> DSparkNetwork:
    """As dflash_network.read_network."""
    return DSparkNetwork(spec, folder, read_target(target))


class DSparkSession:
    """A DraftSession. One forward computes a block; each token then chooses among the next row's with its bias."""

    is_lazy = True

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

    def unread(self, text: Sequence[int]) -> int:
        self._block = []
        return self._context.unread(text)

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
