"""A draft model that predicts several positions in one forward: PARD (An et al. 2025, arXiv:2504.18583).

It is an ordinary model that was trained to see a mask token in place of each unknown token. The rows of a forward are
the unread tokens, then n - 1 mask tokens; the last n rows predict the next n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.arrays import Logits
from edgespec.core.decoding import resize_logits
from edgespec.core.protocols import Draft, Session
from edgespec.drafters.sequential import TextReader

_MAX_BLOCK = 16  # positions


class PardSession(TextReader):
    """A BlockSession over a session of a PARD model."""

    block_size = _MAX_BLOCK

    def __init__(self, session: Session, vocab_size: int, mask_token: int) -> None:
        """`vocab_size` is the target's. Raises ValueError for a mask token that the model does not have."""
        if not 0 <= mask_token < session.capabilities.vocab_size:
            raise ValueError(f"the model has no token {mask_token}")
        super().__init__(session)
        self._vocab_size = vocab_size
        self._mask_token = mask_token

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        unread = self.prepare(text, window, n - 1)
        if unread is None:
            return None
        n = min(n, self.session.draft_limit + 2 - len(unread))
        masks = [self._mask_token] * (n - 1)
        scores = self.session.forward(unread[0], Draft.chain([*unread[1:], *masks]))
        first = len(unread) - 1
        rows = [resize_logits(scores.logits(first + i), self._vocab_size).copy() for i in range(n)]
        self.session.commit(range(first))
        self.session.checkpoint()
        return rows
