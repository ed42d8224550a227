"""Tokenizers for the text tests: a table of byte strings, and a real trained one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

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


class TrainedTokenizer:
    """A byte-level BPE of the `tokenizers` package."""

    bos: int | None = 0
    eos: int | None = 0
    add_bos = True
    end_of_generation = frozenset([0])

    def __init__(self, bpe: tokenizers.Tokenizer) -> None:
        self.bpe = bpe
        self.special = {i for i, added in bpe.get_added_tokens_decoder().items() if added.special}
        self.bytes = {char: byte for byte, char in _byte_chars().items()}
        self.vocab_size = bpe.get_vocab_size()

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        self.bpe.encode_special_tokens = not parse_special
        ids: list[int] = self.bpe.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, token: int) -> bytes:
        return b"" if token in self.special else bytes(self.bytes[c] for c in self.special_text(token))

    def special_text(self, token: int) -> str:
        text = self.bpe.id_to_token(token)
        assert text is not None
        return text


def _byte_chars() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def _train() -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", *SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    return bpe


@pytest.fixture(scope="session")
def table() -> Callable[..., Tokenizer]:
    """Makes a tokenizer from a list of byte strings."""
    return TableTokenizer


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    """A real vocabulary: from EDGESPEC_TEST_MODELS if it is there, else trained on the spot."""
    folder = os.environ.get("EDGESPEC_TEST_MODELS") or Path(__file__).parents[3] / "shared" / "models"
    file = Path(folder) / "target" / "tokenizer.json"
    return TrainedTokenizer(tokenizers.Tokenizer.from_file(str(file)) if file.is_file() else _train())
