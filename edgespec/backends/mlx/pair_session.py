"""Heads that read pairs of a token and the hidden state before it, on MLX: EAGLE and MTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from edgespec.backends.features import Features
from edgespec.backends.mlx.draft_vocabulary import ScoringNetwork, choose_scorer
from edgespec.backends.mlx.forward_context import ForwardContext
from edgespec.backends.mlx.keyvalues import KeyValues, write_rows
from edgespec.backends.mlx.lazy_draft import DeviceDraft
from edgespec.backends.mlx.library import map_errors, read
from edgespec.backends.mlx.scores import MlxScores
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.sequence import shared_prefix
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled, Draft
from edgespec.core.scores import Scores
from edgespec.errors import BackendError

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

    is_lazy = True

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

    def unread(self, text: Sequence[int]) -> int:
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
