"""Networks of trained heads on MLX, and how they are run beside their target."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import mlx.core as mx

from edgespec.backends.features import Features
from edgespec.backends.head_session import HeadRunner
from edgespec.backends.mlx.caches import KeyValues
from edgespec.backends.mlx.forward import ForwardContext, TreeRows, tree_positions
from edgespec.backends.mlx.heads.draft_vocabulary import DraftVocabulary, ShortVocabulary, take_rows
from edgespec.backends.mlx.heads.weights import HeadWeights
from edgespec.backends.mlx.library import map_errors, read
from edgespec.backends.mlx.scores import greedy_chain
from edgespec.backends.mlx.session import MlxSession
from edgespec.cancel import check_cancelled
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Draft
from edgespec.core.scores import Scores

_CHUNK = 512  # rows that are read in one forward


class HeadNetwork(ABC):
    """The weights of a head and what they compute. H is the target's hidden size, V its vocabulary size.

    layers       of the target, whose hidden states it reads; as in formats.heads.HeadSpec
    depth        layers with keys and values of their own; without any a draft reads the last state alone
    reads_pairs  whether a row is a state and the token after it; else it is a state alone
    takes_trees  whether rows may be those of a tree of drafted tokens; its caches are KeyValues then
    n_drafts     the most tokens that it drafts after a text; None for no limit
    nbytes       bytes of its own weights
    dtype        of these weights; None if `run` takes states of any type
    vocabulary   the tokens that it scores
    short        the same head with frequent tokens alone; None if there is none
    """

    layers: tuple[int, ...] = ()
    depth = 0
    reads_pairs = True
    takes_trees = False
    n_drafts: int | None = None
    nbytes: int
    dtype: Any = None
    vocabulary: DraftVocabulary
    short: ShortVocabulary | None = None
    _outputs: list[Callable[[Any], Any]]  # matrices with a row for each token that is scored

    def open_caches(self, target: MlxSession, position: int) -> Any:
        """Empty keys and values of each layer, or what else a draft after `position` tokens of `target` reads."""
        return [KeyValues(ForwardContext()) for _ in range(self.depth)]

    def fuse(self, features: Any) -> Any:
        """States [n, h] that stand for the target's features [n, width]."""
        return features if self.dtype is None else features.astype(self.dtype)

    @abstractmethod
    def run(self, tokens: Any, states: Any, caches: Any) -> Any:
        """Computes the output [n, h] of states [n, h], which follow those in `caches`, and the tokens [n] after them.

        A head that reads no pairs of states and tokens returns the arrays that have to be computed.
        """

    def run_tree(self, tree: Draft, states: Any, caches: Sequence[KeyValues]) -> Any:
        """`run` for the last nodes of a tree, with the states [n, h] of their parents; `caches` hold the others."""
        n = len(states)
        held = len(tree) - n
        whole = TreeRows.from_draft(tree, caches[0].length - held - 1)
        rows = TreeRows(whole.position + 1, whole.depth[1:] - 1, whole.mask[1 + held :, 1:])
        with ExitStack() as built, tree_positions(rows.depth[held:] - held):
            for cache in caches:
                built.enter_context(cache.context.build(rows))
            return self.run(mx.array(tree.tokens[held:]), states, caches)

    def start_draft(self, root: int, output: Any, caches: Any) -> Any:
        """What the draft after `root` begins with; `output` is that of the last `run`."""
        return output[-1:]

    def follow(self, token: Any, output: Any, caches: Any) -> Any:
        """The output after a drafted `token` [1], given the output before it."""
        return self.run(token, self.feed_back(output), caches)

    def feed_back(self, output: Any) -> Any:
        """The states [n, h] that stand for features if the target has none yet."""
        return output

    @abstractmethod
    def score(self, output: Any, n: int = 1) -> Any:
        """Logits [1, V] float32 of the next token, or [n, V] of a block; -inf for tokens outside of `vocabulary`."""

    def _finish(self, weights: HeadWeights, vocabulary: DraftVocabulary) -> None:
        """Read the weights that were taken from the files. Raises BackendError."""
        weights.load()
        self.nbytes, self.dtype, self.vocabulary = weights.nbytes, weights.dtype, vocabulary

    def shorten(self, ids: Any) -> Self:
        """The same head with only the rows `ids` [W] of its output matrices. Its `nbytes` count these rows alone.

        Raises Unsupported.
        """
        taken = {id(each): take_rows(each, ids) for each in self._outputs}  # some heads share one matrix
        short = copy.copy(self)
        short._outputs = [multiply for multiply, _ in (taken[id(each)] for each in self._outputs)]
        short.nbytes = sum(nbytes for _, nbytes in taken.values())
        short.vocabulary = DraftVocabulary(ids, self.vocabulary.vocab_size)
        return short


class NetworkRunner(HeadRunner):
    """Runs a network beside a session of its target."""

    is_async = True

    def __init__(self, network: HeadNetwork, target: MlxSession) -> None:
        self.reads_pairs, self.has_cache, self.max_drafts = network.reads_pairs, network.depth > 0, network.n_drafts
        self.takes_trees = network.takes_trees
        self._network = self._scorer = network
        self._target = target
        self._first = 0  # position of the first row
        self._caches: Any = None
        self._output: Any = None  # of the last token
        self._outputs: Any = None  # [1 + n, h] of the text and of the nodes of a tree

    def restart(self, first: int, last: int) -> None:
        self._first = first
        self._caches = self._network.open_caches(self._target, last)

    def trim(self, position: int) -> None:
        for cache in self._caches:
            cache.rewind(position - self._first)

    def read(self, text: Sequence[int], first: int, features: Features[Any]) -> int:
        check_cancelled()
        end = min(first + _CHUNK, len(text) - 1)
        with map_errors():
            states = self._network.fuse(features.take(first, end))
            self._output = self._network.run(mx.array(list(text[first + 1 : end + 1])), states, self._caches)
            mx.async_eval(self._output)
        return end

    def start(self, text: Sequence[int]) -> None:
        short = self._network.short
        self._scorer = short.network if short is not None and short.suits(text) else self._network
        with map_errors():
            self._output = self._outputs = self._scorer.start_draft(text[-1], self._output, self._caches)

    def score(self) -> Logits:
        return self.block(1)[0]

    def step(self, token: int) -> Logits:
        with map_errors():
            row: Logits = read(self._follow(mx.array([token])))[0][0]
            if self.takes_trees:
                self._outputs = mx.concatenate([self._outputs, self._output])
        return row

    def branch(self, tree: Draft, n: int) -> list[Logits]:
        scorer = self._scorer
        with map_errors():
            states = scorer.feed_back(self._outputs[mx.array(tree.parents[-n:] + 1)])
            output = scorer.run_tree(tree, states, self._caches)
            self._outputs = mx.concatenate([self._outputs, output])
            return list(read(scorer.score(output, n))[0])

    def rollout(self, n: int) -> tuple[Draft, Scores]:
        """Nothing waits for the device."""
        with map_errors():
            first = self._scorer.score(self._output)
            chain, scores = greedy_chain(first, self._follow, n, first.shape[-1])
            mx.async_eval(chain.array, scores.array)
        return chain, scores

    def block(self, n: int) -> list[Logits]:
        with map_errors():
            return list(read(self._scorer.score(self._output, n))[0])

    def close(self) -> None:
        self._caches = self._output = None
        mx.clear_cache()

    def _follow(self, token: Any) -> Any:
        """Run a drafted `token` [1]; returns the scores [1, V] after it, which are not computed yet."""
        self._output = self._scorer.follow(token, self._output, self._caches)
        mx.async_eval(self._output)
        return self._scorer.score(self._output)
