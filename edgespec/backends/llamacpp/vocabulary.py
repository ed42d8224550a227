"""A GGUF model's vocabulary as the text layer's Tokenizer."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

from edgespec.backends.ids import IdRange
from edgespec.errors import BackendError


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

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        raw = text.encode("utf-8", "replace")
        if not raw:
            return []
        size = len(raw) + 8
        buffer = (ctypes.c_int32 * size)()
        n = self._api.llama_tokenize(self._vocab, raw, len(raw), buffer, size, False, parse_special)
        if n < 0:  # the vocabulary needs more tokens than bytes: -n of them
            size = -n
            buffer = (ctypes.c_int32 * size)()
            n = self._api.llama_tokenize(self._vocab, raw, len(raw), buffer, size, False, parse_special)
        if n < 0:
            raise BackendError("the text could not be tokenized.", hint="Shorten the text.")
        return buffer[:n]

    def special_text(self, token: int) -> str:
        self.check(token)
        text: bytes = self._api.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace")

    def render(self, token: int) -> bytes:
        size = 64
        buffer = ctypes.create_string_buffer(size)
        n = self._api.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
        if n < 0:
            size = -n
            buffer = ctypes.create_string_buffer(size)
            n = self._api.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
        return buffer.raw[:n]
