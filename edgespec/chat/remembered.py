"""What the memory keeps of a conversation."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from edgespec.folders import ADAPTED, MEMORY
from edgespec.memory.administration import TextStore
from edgespec.models.versions import clear_runs


def name_source(id: int) -> str:
    """The source under which the memory keeps the texts of a saved conversation."""
    return f"chat:{id}"


def forget_conversation(folder: Path, id: int) -> None:
    """Remove the texts of a conversation from the memory in the data folder `folder`. Trainings that are not complete
    are removed too, since they may hold the texts. Raises CacheError.
    """
    if (memory := folder / MEMORY).is_dir():
        with closing(TextStore.open(memory)) as store:
            store.forget(name_source(id))
    clear_runs(folder / ADAPTED, own_texts=False)
