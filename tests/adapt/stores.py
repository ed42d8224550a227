"""A memory with conversations and documents, as an engine stores them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from edgespec.memory.memory import Memory
from edgespec.memory.store import TextStore
from tests.memory.texts import make_tokens

TOKENIZER = "tokenizer"
LIMIT = 2**30


def add_texts(folder: Path, texts: list[tuple[list[int], int, str | None]], namespace: str = "") -> None:
    """Store (tokens, number of them in the prompt, conversation) as an engine does."""
    with closing(Memory(folder, TOKENIZER, LIMIT)) as memory:
        for tokens, n_prompt, source in texts:
            memory.space(namespace).add(tokens, n_prompt, source)


def add_conversations(folder: Path, n: int, length: int = 1000, n_prompt: int = 100, first: int = 0) -> None:
    """Store conversations chat:1, chat:2, ..., of tokens that no other one has."""
    texts = [(make_tokens(first + i, length), n_prompt, f"chat:{first + i + 1}") for i in range(n)]
    add_texts(folder, texts)


def add_document(folder: Path, path: str, tokens: list[int]) -> None:
    with closing(TextStore.open(folder)) as store:
        corpus = store.open_corpus(TOKENIZER, limit_bytes=LIMIT)
        corpus.add(Path(path), tokens)
        corpus.finish()
