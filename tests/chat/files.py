"""Files of conversations for tests."""

from __future__ import annotations

from pathlib import Path

from edgespec.chat import Conversation, Store, Turn


def filled(path: Path, turns: int = 200) -> Conversation:
    """A closed file with one conversation."""
    store = Store.open(path)
    conversation = store.insert(
        store.new("toy"),
        [Turn(n, 0, None, "user", f"{n} " * 100, "", [], {}, {}, True, 1.0) for n in range(turns)],
    )
    store.close()
    return conversation


def works(store: Store) -> bool:
    """Whether what is written can be read back."""
    conversation = store.new("toy")
    return store.path(store.add(conversation, None, "user", "Hello"))[0].text == "Hello"
