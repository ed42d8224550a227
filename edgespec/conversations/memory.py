"""The memory of earlier texts, as far as it concerns conversations: its folder, and what it has of one of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from edgespec.conversations.database import data_folder
from edgespec.errors import CacheError
from edgespec.memory.store import TextStore
from edgespec.units import gib


def memory_folder() -> Path:
    """The folder of the user's memory; it may be missing."""
    return data_folder() / "memory"


def name_source(id: int) -> str:
    """The source under which the memory keeps the texts of a saved conversation."""
    return f"chat:{id}"


def forget_conversation(folder: Path, id: int) -> None:
    """Remove the texts of a conversation from the memory in `folder`, if there is one. Raises CacheError."""
    if folder.is_dir():
        with closing(TextStore.open(folder)) as store:
            store.forget(name_source(id))


def describe_memory() -> dict[str, Any]:
    """The path of the user's memory, its state in words, and how many tokens and bytes it has where there is one."""
    folder = memory_folder()
    if not folder.is_dir():
        return {"path": str(folder), "state": "nothing is kept yet"}
    try:
        with closing(TextStore.open(folder)) as store:
            tokens, n_bytes = sum(each.n_tokens for each in store.status()), store.size()
    except CacheError as error:
        return {"path": str(folder), "state": f"cannot be used: {error.message}"}
    return {"path": str(folder), "state": f"{tokens:,} tokens in {gib(n_bytes)}", "tokens": tokens, "bytes": n_bytes}
