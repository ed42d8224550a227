"""A tokenizer that is a table of byte strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from edgespec.text.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<think>", "</think>"]  # ids 0 to 3 of every tokenizer here


class TableTokenizer:
    """Ids 0 to 3 are control tokens; every further id stands for the byte string given for it."""

    bos: int | None = 0

    def __init__(self, pieces: Sequence[bytes], *, add_bos: bool = True, end: int = 1) -> None:
        self.end_of_generation = frozenset([end])
        self.pieces = [b""] * len(SPECIALS) + list(pieces)
        self.add_bos = add_bos

    @property
    def control_tokens(self) -> list[int]:
        return [token for token, piece in enumerate(self.pieces) if not piece]

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        spelled = {piece: i for i, piece in enumerate(self.pieces) if piece}
        spelled |= {name.encode(): i for i, name in enumerate(SPECIALS)} if parse_special else {}
        data, tokens = text.encode(), []
        while data:
            longest = max((piece for piece in spelled if data.startswith(piece)), key=len)
            tokens.append(spelled[longest])
            data = data[len(longest) :]
        return tokens

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def special_text(self, token: int) -> str:
        return SPECIALS[token]


@pytest.fixture(scope="session")
def table() -> Callable[..., Tokenizer]:
    """Makes a tokenizer from a list of byte strings."""
    return TableTokenizer
