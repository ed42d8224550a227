"""Sessions of trained heads on MLX: they read the target's hidden states and draft tokens one by one, or a block."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx

from edgespec.backends.attached_draft import Features
from edgespec.backends.mlx.caches import ForwardContext, KeyValues, write_rows
from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary, ShortVocabulary, choose_scorer, take_rows
from edgespec.backends.mlx.head_parts import HeadWeights
from edgespec.backends.mlx.library import map_errors, read
from edgespec.backends.mlx.scores import DeviceDraft, MlxScores
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.sequence import shared_prefix
from edgespec.core.protocols import CheckCancelled, Draft
from edgespec.core.sampling import Logits
from edgespec.core.scores import Scores
from edgespec.errors import BackendError

_CHUNK = 512  # rows that are read in one forward


class HeadNetwork(ABC):
    """The weights of a head and what they compute. H is the target's hidden size, V its vocabulary size.

    layers       of the target, whose hidden states it reads; as in formats.heads.HeadSpec
    depth        layers with keys and values of their own; without any a draft reads the last state alone
    reads_pairs  whether a row is a state and the token after it; else it is a state alone
    n_drafts     the most tokens that it drafts after a text; None for no limit
    nbytes       bytes of its own weights
    dtype        of these weights
    vocabulary   the tokens that it scores
    short        the same head with frequent tokens alone; None where there is none
    """

    layers: tuple[int, ...] = ()
    depth = 0
    reads_pairs = True
    n_drafts: int | None = None
    nbytes: int
    dtype: Any
    vocabulary: DraftVocabulary
    short: ShortVocabulary | None = None
    _outputs: list[Callable[[Any], Any]]  # matrices with a row for each token that is scored

    def open_caches(self, target: MlxSession, position: int) -> Any:
        """Empty keys and values of each layer, or what else a draft after `position` tokens of `target` reads."""
        return [KeyValues(ForwardContext()) for _ in range(self.depth)]

    def fuse(self, features: Any) -> Any:
        """States [n, h] that stand for the target's features [n, width]."""
        return features.astype(self.dtype)

    @abstractmethod
    def run(self, tokens: Any, states: Any, caches: Any) -> Any:
        """Output [n, h] of rows with these states [n, h] and the tokens [n] after them, which follow those in `caches`.

        A head that does not read pairs returns the arrays that the device should compute.
        """

    def start_draft(self, root: int, output: Any, caches: Any) -> Any:
        """What the draft after `root` begins with; `output` is that of the last `run`."""
        return output[-1:]

    def follow(self, token: Any, output: Any, caches: Any) -> Any:
        """The output after a drafted `token` [1], given the output before it."""
        return self.run(token, self.feed_back(output), caches)

    def feed_back(self, output: Any) -> Any:
        """The states [n, h] that stand for features where the target has none yet."""
        return output

    @abstractmethod
    def score(self, output: Any, n: int = 1) -> Any:
        """Logits [1, V] float32 of the next token, or [n, V] of a block; -inf for tokens outside of `vocabulary`."""

    def _finish(self, weights: HeadWeights, vocabulary: DraftVocabulary) -> None:
        """Read the weights that were taken from the files. Raises BackendError."""
        weights.load()
        self.nbytes, self.dtype, self.vocabulary = weights.nbytes, weights.dtype, vocabulary

    def shorten(self, ids: Any) -> Self:
        """The same head with the rows `ids` [W] int32 of its output matrices. Raises ValueError as `take_rows`."""
        taken = {id(each): take_rows(each, ids) for each in self._outputs}  # some heads share one matrix
        short = copy.copy(self)
        short._outputs = [taken[id(each)] for each in self._outputs]
        short.vocabulary = DraftVocabulary(ids, self.vocabulary.vocab_size)
        return short


class HeadCache:
    """Rows of a head from position `first` to `held`. Row p has the target's state of token p, a pair token p + 1 too.

    Keeps what the network has made of the features of pairs, a state [h] a position, so that a text may be continued
    from anywhere with other tokens: features are freed once they were read.
    """

    def __init__(self, network: HeadNetwork, target: MlxSession, features: Features[Any]) -> None:
        self.caches: Any = None
        self.first = self.held = self._n_states = 0
        self._states: Any = None
        self._network = network
        self._target = target
        self._features = features

    def clear(self) -> None:
        """Hold nothing; `restart` comes before the next read."""
        self.first = self.held = self._n_states = 0
        self._states = self.caches = None

    def restart(self, last: int, most: int) -> None:
        """Begin at most `most` rows before position `last`, where there are features."""
        self.clear()
        self.first = self.held = self._n_states = max(self._features.start, last - most)
        self.caches = self._network.open_caches(self._target, last)

    def rewind(self, held: int, known_tokens: int) -> None:
        """Drop provisional rows, rows from `held` on, and the states of tokens from `known_tokens` on."""
        if held < self.first or not self._network.depth:
            self.clear()
            return
        self.held = min(self.held, held)
        self._n_states = min(self._n_states, known_tokens)
        for cache in self.caches or ():  # which hold more after a read that failed
            cache.rewind(self.held - self.first)

    def can_read(self) -> bool:
        """Whether there are features or states from the first row that is not held."""
        return self.caches is not None and (self.held < self._n_states or self._features.start <= self.held)

    def read(self, tokens: Sequence[int]) -> Any:
        """The network's output of the next rows, whose tokens are these [n]."""
        end = self.held + len(tokens)
        output = self._network.run(mx.array(list(tokens)), self._take_states(end), self.caches)
        mx.async_eval(output, self._states)
        self._features.release(end - 1)  # the last row may be read again
        self.held = end
        return output

    def _take_states(self, end: int) -> Any:
        """[n, h] of the rows from `held` to `end`."""
        if not self._network.reads_pairs:
            return self._network.fuse(self._features.take(self.held, end))
        if end > self._n_states:
            fused = self._network.fuse(self._features.take(self._n_states, end))
            self._states = write_rows(self._states, self._n_states - self.first, fused)
            self._n_states = end
        return self._states[self.held - self.first : end - self.first]


class _HeadReader:
    """Reads the rows of a text. Drafted tokens are read again once the target has accepted them."""

    def __init__(
        self, network: HeadNetwork, target: MlxSession, features: Features[Any], check: CheckCancelled
    ) -> None:
        """`features` are those of `target`, whose tap ends with this session."""
        self._network = self._scorer = network
        self._target = target
        self._features = features
        self._check = check
        self._cache = HeadCache(network, target, features)
        self.text: list[int] = []  # the `_base` tokens that were read, then the drafted ones
        self._base = 0
        self._output: Any = None  # of the last token

    def begin(self, text: Sequence[int]) -> None:
        """Keeps the rows of the prefix that `text` shares with the last one."""
        self._base = shared_prefix(self.text[: self._base], text, len(text))
        self._settle(text)

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Rows of `text` that a draft computes: those that are not held, and always the last pair or a block's root."""
        self._settle(text)
        last = len(text) - 1
        if not self._network.depth:
            return min(1, last)
        if not self._network.reads_pairs:
            return last - self._cache.held + 1
        return min(last, max(1, last - self._cache.held))

    def close(self) -> None:
        self._target.untap()
        self._cache.clear()
        self._output = None
        mx.clear_cache()

    def _settle(self, text: Sequence[int]) -> None:
        """Forget drafted tokens, and what belongs to other tokens than those of `text`."""
        self._base = min(self._base, len(text))
        del self.text[self._base :]
        held = self._base - 1 if self._network.reads_pairs else min(self._base, len(text) - 1)
        self._cache.rewind(held, self._base)

    def _start(self, text: Sequence[int], window: int) -> bool:
        """Read the rows of `text`, of a long unread part those of the last `window` tokens, and start a draft.

        False where there are none, or no room. Raises BackendError, Cancelled.
        """
        self._settle(text)
        cache, network, last = self._cache, self._network, len(text) - 1
        if not 0 < last < self._target.capabilities.context_size:
            return False
        if self._features.end < last:
            raise BackendError("the head has no hidden states of the text.", hint="Report this as a bug.")
        if network.reads_pairs and cache.held == last:  # read before: its last pair runs again, for its output
            cache.rewind(last - 1, len(text))
        most = max(1, window if network.reads_pairs else window - 1) if network.depth else 1
        with map_errors():
            if last - cache.held > most or not cache.can_read():
                cache.restart(last, most)
                self.text, self._base = [], 0
            while cache.held < last:
                self._check()
                end = min(cache.held + _CHUNK, last)
                self._output = cache.read(text[cache.held + 1 : end + 1])
                self._base = end + network.reads_pairs
                self.text = list(text[: self._base])
            if cache.held == cache.first:
                return False
            self.text, self._base = list(text), len(text)
            self._scorer = choose_scorer(network, text)
            self._output = self._scorer.start_draft(text[-1], self._output, cache.caches)
        return True


class HeadSession(_HeadReader):
    """A DraftSession of a head that drafts token by token."""

    is_async = True

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """[V] after `text`. None for a text of one token, and at the end of the context."""
        return self._host_scores() if self._start(text, window) else None

    def step(self, token: int) -> Logits | None:
        """[V] after one more token; None behind the last one that the head drafts, and at the end of the context."""
        if len(self.text) - self._base + 1 >= self._most_drafts:
            return None
        with map_errors():
            self._follow(mx.array([token]))
        self.text.append(token)
        return self._host_scores()

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        """A chain of best tokens and their scores; nothing waits for the device."""
        if not self._start(text, window):
            return None
        with map_errors():
            rows = [self._scorer.score(self._output)]
            best = [mx.argmax(rows[0], axis=-1)]
            while len(best) < min(n, self._most_drafts):
                self._follow(best[-1])
                rows.append(self._scorer.score(self._output))
                best.append(mx.argmax(rows[-1], axis=-1))
            chain, scores = DeviceDraft(mx.concatenate(best)), mx.concatenate(rows)
            mx.async_eval(chain.array, scores)
        return chain, MlxScores(scores, draft=chain)

    @property
    def _most_drafts(self) -> int:
        """Tokens that can be drafted after the text that was read."""
        room = self._target.capabilities.context_size - self._base + 1
        return room if self._network.n_drafts is None else min(room, self._network.n_drafts)

    def _follow(self, token: Any) -> None:
        """Run a drafted `token` [1]."""
        self._output = self._scorer.follow(token, self._output, self._cache.caches)
        mx.async_eval(self._output)

    def _host_scores(self) -> Logits:
        with map_errors():
            logits: Logits = read(self._scorer.score(self._output))[0][0]
        return logits


class BlockHeadSession(_HeadReader):
    """A BlockSession of a head that drafts several tokens at once."""

    @property
    def block_size(self) -> int:
        assert self._network.n_drafts is not None
        return self._network.n_drafts

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        """Up to `n` rows [V]. None for a text of one token, and at the end of the context."""
        if not self._start(text, window):
            return None
        with map_errors():
            (rows,) = read(self._scorer.score(self._output, n))
        return list(rows)
