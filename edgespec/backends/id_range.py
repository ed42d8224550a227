"""The part of a tokenizer that all runtimes share: a range of ids, and the bytes of each, rendered once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property


class IdRange(ABC):
    """Ids 0..vocab_size - 1 with the bytes of each."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text. Raises ValueError for an id outside the range."""
        piece = self._pieces.get(token)
        if piece is None:
            self.check(token)
            piece = self._pieces[token] = self.render(token)
        return piece

    @cached_property
    def control_tokens(self) -> frozenset[int]:
        return frozenset(token for token in range(self.vocab_size) if not self.piece(token))

    @abstractmethod
    def render(self, token: int) -> bytes:
        """The bytes of an id of the range."""

    def check(self, token: int) -> None:
        """Raises ValueError for an id outside the range."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is not in 0..{self.vocab_size - 1}")

    def id_or_none(self, token: int | None) -> int | None:
        return token if token is not None and 0 <= token < self.vocab_size else None
