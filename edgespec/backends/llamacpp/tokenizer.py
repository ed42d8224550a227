"""A GGUF model's vocabulary as the text layer's Tokenizer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Any

from edgespec.backends.id_range import IdRange
from edgespec.errors import InvalidModelFile


class LlamaTokenizer(IdRange):
    """Tokenizer over a llama.cpp vocabulary handle; valid as long as its model."""

    def __init__(self, api: Any, vocab: Any) -> None:
        super().__init__(api.llama_vocab_n_tokens(vocab))
        self._api = api
        self._vocab = vocab
        self.bos: int | None = self.id_or_none(api.llama_vocab_bos(vocab))
        self.eos: int | None = self.id_or_none(api.llama_vocab_eos(vocab))
        self.add_bos: bool = bool(api.llama_vocab_get_add_bos(vocab)) and self.bos is not None

    @cached_property
    def end_of_generation(self) -> frozenset[int]:
        is_eog = self._api.llama_vocab_is_eog
        return frozenset(t for t in range(self.vocab_size) if is_eog(self._vocab, t))

    @cached_property
    def control_tokens(self) -> frozenset[int]:
        """Found by their kind, since reading the text of a whole vocabulary takes half a second."""
        kind_of, normal = self._api.llama_vocab_get_attr, self._api.LLAMA_TOKEN_ATTR_NORMAL
        special = [token for token in range(self.vocab_size) if not kind_of(self._vocab, token) & normal]
        return frozenset(token for token in special if not self.piece(token))

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        raw = text.encode("utf-8", "replace")
        tokenize = self._api.llama_tokenize
        if not raw:
            return []
        tokens: list[int] = _read_buffer(
            ctypes.c_int32,
            len(raw) + 8,
            lambda buffer, size: tokenize(self._vocab, raw, len(raw), buffer, size, False, parse_special),
        )
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:  # its kind does not fit its vocabulary
            raise InvalidModelFile("the tokenizer of this model gives tokens that the model does not have.")
        return tokens

    def special_text(self, token: int) -> str:
        self.check(token)
        text: bytes = self._api.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace")

    def render(self, token: int) -> bytes:
        spell = self._api.llama_token_to_piece
        text: bytes = _read_buffer(
            ctypes.c_char, 64, lambda buffer, size: spell(self._vocab, token, buffer, size, 0, False)
        )
        return text


def _read_buffer(kind: Any, size: int, write: Callable[[Any, int], int]) -> Any:
    """What `write` writes to a buffer of `size` elements; it returns how many, or minus the size that it needs."""
    buffer = (kind * size)()
    n = write(buffer, size)
    if n < 0:
        buffer = (kind * -n)()
        n = write(buffer, -n)
    return buffer[:n]
