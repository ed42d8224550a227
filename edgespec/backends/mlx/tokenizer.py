"""A Hugging Face tokenizer, loaded by mlx-lm, as the text layer's Tokenizer."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

from edgespec.backends.id_range import IdRange

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Ends of a turn, which model folders do not always list.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end_of_turn|>")


class HfTokenizer(IdRange):
    """Tokenizer over mlx-lm's wrapper. Ids beyond the vocabulary pad the embedding; their text is [PAD<id>]."""

    def __init__(self, wrapper: Any, vocab_size: int) -> None:
        """`vocab_size` is the width of the model's logits."""
        super().__init__(vocab_size)
        self._wrapper = wrapper
        self._lock = threading.Lock()  # `encode` of transformers changes the tokenizer, depending on its arguments
        self.bos: int | None = self.id_or_none(wrapper.bos_token_id)
        self.eos: int | None = self.id_or_none(wrapper.eos_token_id)
        self.add_bos: bool = self.bos is not None and wrapper.encode("a")[:1] == [self.bos]
        self._n_entries = min(len(wrapper), vocab_size)

    @cached_property
    def end_of_generation(self) -> frozenset[int]:
        ends = {token for token in self._wrapper.eos_token_ids if 0 <= token < self.vocab_size}
        named = self._wrapper.get_added_vocab()
        return frozenset(
            ends | {named[name] for name in _TURN_ENDS if named.get(name, self.vocab_size) < self.vocab_size}
        )

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates have no bytes
        with self._lock:
            ids: list[int] = self._wrapper.encode(
                text, add_special_tokens=False, split_special_tokens=not parse_special
            )
            if max(ids, default=0) >= self.vocab_size:  # an added token that the model does not have
                ids = self._wrapper.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    def special_text(self, token: int) -> str:
        self.check(token)
        text = self._wrapper.convert_ids_to_tokens(token) if token < self._n_entries else None
        return text or f"[PAD{token}]"

    def render(self, token: int) -> bytes:
        if token in self._control_tokens or token >= self._n_entries:
            return b""
        if (added := self._added.get(token)) is not None:
            return added
        text = self._wrapper.convert_ids_to_tokens(token)
        return self._bytes_of(text) if text else b""

    @cached_property
    def _control_tokens(self) -> frozenset[int]:
        """Control tokens, which add no bytes to the text."""
        special = {token for token, added in self._wrapper.added_tokens_decoder.items() if added.special}
        return frozenset(special | set(self._wrapper.all_special_ids) | self.end_of_generation)

    @cached_property
    def _added(self) -> dict[int, bytes]:
        """Added tokens by their id. The wrapper makes its list again for each look at it."""
        return {token: str(added.content).encode() for token, added in self._wrapper.added_tokens_decoder.items()}

    @cached_property
    def _bytes_of(self) -> Callable[[str], bytes]:
        """The function from an entry of the vocabulary to its bytes: byte-level BPE, SentencePiece, or plain UTF-8."""
        backend = getattr(self._wrapper, "backend_tokenizer", None)
        kinds = _decoder_kinds(json.loads(backend.to_str()).get("decoder")) if backend is not None else set()
        if "ByteLevel" in kinds:
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            table = {character: byte for byte, character in bytes_to_unicode().items()}
            return lambda text: b"".join(bytes([table[c]]) if c in table else c.encode() for c in text)
        if backend is None or kinds & {"Replace", "Metaspace", "ByteFallback"}:
            return _sentencepiece_bytes
        return lambda text: text.encode()


def _decoder_kinds(decoder: Any) -> set[str]:
    """The types of a tokenizers decoder and of the decoders inside it."""
    if not isinstance(decoder, dict):
        return set()
    inner = (_decoder_kinds(each) for each in decoder.get("decoders", ()))
    return {str(decoder.get("type"))}.union(*inner)


def _sentencepiece_bytes(text: str) -> bytes:
    if byte := _BYTE.fullmatch(text):
        return bytes([int(byte[1], 16)])
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
