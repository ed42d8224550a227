"""Embeddings of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgespec.backends import Model
from edgespec.core.batching import YIELD, Yield
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import InvalidRequest, PromptTooLong
from edgespec.text.chat_template import check_length, encode_prompt


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector of length 1, and the number of tokens of its text."""

    vector: tuple[float, ...]
    tokens: int


def embed(model: Model, texts: Sequence[str | Sequence[int]], check: CheckCancelled) -> Iterator[Embedding | Yield]:
    """Yield an embedding for each text, in order; a text may be token ids. Raises InvalidRequest, PromptTooLong,
    BackendError, Cancelled.
    """
    tokenizer, size = model.tokenizer, model.context_size
    read: list[list[int]] = []
    for text in texts:
        check()
        yield YIELD
        if isinstance(text, str):
            check_length(text, size)
            tokens = encode_prompt(tokenizer, text, parse_special=True) if text else []
        else:
            tokens = list(text)
        if not tokens:
            raise InvalidRequest("an input is empty.", hint="Leave it out.")
        if len(tokens) > size:
            message = f"an input has {len(tokens):,} tokens, the context holds {size:,}."
            raise PromptTooLong(message, hint="Cut it.", n_prompt=len(tokens), n_context=size)
        if min(tokens) < 0 or max(tokens) >= tokenizer.vocab_size:
            raise InvalidRequest(f"token ids go from 0 to {tokenizer.vocab_size - 1:,}.", hint="Send text instead.")
        read.append(tokens)
    embedder = model.open_embedder(max(map(len, read)), check)
    try:
        for tokens in read:
            vector = yield from embedder.embed(tokens)
            yield Embedding(tuple(vector.tolist()), len(tokens))
    finally:
        embedder.close()
