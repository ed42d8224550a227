"""PARD: a draft model that predicts several positions in one forward (An et al. 2025, arXiv:2504.18583).

It is an ordinary model that was trained to see a mask token in place of each unknown token. The rows of a forward are
the unread tokens, then n - 1 mask tokens; the last n rows predict the next n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.arrays import Logits
from edgespec.core.greedy import resize_logits
from edgespec.core.protocols import Draft, Session
from edgespec.drafters.text_reader import TextReader

_MAX_BLOCK = 16  # positions


class PardSession:
    """A BlockSession over a session of a PARD model."""

    block_size = _MAX_BLOCK

    def __init__(self, session: Session, vocab_size: int, mask_token: int) -> None:
        """`vocab_size` is the target's. Raises ValueError for a mask token that the model does not have."""
        if not 0 <= mask_token < session.capabilities.vocab_size:
            raise ValueError(f"the model has no token {mask_token}")
        self._session = session
        self._reader = TextReader(session)
        self._vocab_size = vocab_size
        self._mask_token = mask_token

    def begin(self, text: Sequence[int]) -> None:
        self._reader.begin(text)

    def unread(self, text: Sequence[int]) -> int:
        return self._reader.unread(text)

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        unread = self._reader.prepare(text, window, n - 1)
        if unread is None:
            return None
        n = min(n, self._session.draft_limit + 2 - len(unread))
        masks = [self._mask_token] * (n - 1)
        scores = self._session.forward(unread[0], Draft.chain([*unread[1:], *masks]))
        first = len(unread) - 1
        rows = [resize_logits(scores.logits(first + i), self._vocab_size).copy() for i in range(n)]
        self._session.commit(range(first))
        self._session.checkpoint()
        return rows

    def close(self) -> None:
        self._session.close()
