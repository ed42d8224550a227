"""DFlash heads on MLX: several tokens in one forward over the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from edgespec.backends.features import Features
from edgespec.backends.mlx.dflash_network import DFlashNetwork
from edgespec.backends.mlx.draft_vocabulary import choose_scorer
from edgespec.backends.mlx.library import map_errors, read
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.sequence import shared_prefix
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError

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

    def unread(self, text: Sequence[int]) -> int:
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
        if self.unread(text) - 1 > most or self._features.start > len(self.text):
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

    def unread(self, text: Sequence[int]) -> int:
        return self._context.unread(text)

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
