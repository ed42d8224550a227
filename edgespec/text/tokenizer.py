"""The tokenizer interface that every runtime implements."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back, over a backend's own vocabulary. Any thread may use it while the model is open."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id in range(vocab_size) is valid."""

    @property
    def bos(self) -> int | None:
        """The begin-of-sequence id, or None where the vocabulary has none."""

    @property
    def eos(self) -> int | None:
        """The end-of-sequence id, which templates may insert between turns, or None."""

    @property
    def add_bos(self) -> bool:
        """Whether the model was trained with `bos` before every sequence."""

    @property
    def end_of_generation(self) -> frozenset[int]:
        """Ids after which a model has finished its turn (EOS, EOT, EOM ...)."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of `text`, never with an added BOS.

        With `parse_special`, text that spells a special token (`<|im_end|>`) becomes that token; without it,
        plain text.
        """

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text; they may end inside a UTF-8 character. Empty for control tokens."""

    def special_text(self, token: int) -> str:
        """The spelling of a token (`<s>`, `<think>`), for templates and comparisons; never empty for a valid id."""
