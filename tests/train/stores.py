"""A memory with conversations and documents, as an engine stores them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from edgespec.memory.administration import TextStore
from edgespec.memory.memory import Memory

TOKENIZER = "tokenizer"
LIMIT = 2**30


def add_texts(folder: Path, texts: list[tuple[list[int], int, str | None]], namespace: str = "") -> None:
    """Store (tokens, number of them in the prompt, conversation) as an engine does."""
    with closing(Memory(folder, TOKENIZER, LIMIT)) as memory:
        for tokens, n_prompt, source in texts:
            memory.space(namespace).add(tokens, n_prompt, source)


def add_document(folder: Path, path: str, tokens: list[int]) -> None:
    with closing(TextStore.open(folder)) as store:
        corpus = store.open_corpus(TOKENIZER, limit_bytes=LIMIT)
        corpus.add(Path(path), tokens)
        corpus.finish()
