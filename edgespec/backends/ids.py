"""The part of a vocabulary that does not depend on whose it is: a range of ids, and their bytes, rendered once."""

from __future__ import annotations

from abc import ABC, abstractmethod


class IdRange(ABC):
    """Ids 0..vocab_size - 1 with the bytes of each."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text. Raises ValueError for an id outside the range."""
        known = self._pieces.get(token)
        if known is None:
            self.check(token)
            known = self._pieces[token] = self.render(token)
        return known

    @abstractmethod
    def render(self, token: int) -> bytes:
        """What `piece` returns for an id of the range."""

    def check(self, token: int) -> None:
        """Raises ValueError for an id outside the range."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is not in 0..{self.vocab_size - 1}")

    def known(self, token: int | None) -> int | None:
        """The id, or None where there is none in the range."""
        return token if token is not None and 0 <= token < self.vocab_size else None
