"""The texts of the memory as data to train on: whether there is enough."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from edgespec.adapt.texts import count_tokens, read_texts, split_texts
from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.memory.store import TextStore

RUN = "training"
"""The folder, in that of a pair, of a run that is not complete; other kinds of runs append to the name."""


@dataclass(frozen=True, slots=True)
class DataStatus:
    """The user's own texts of one tokenizer.

    model            a model with this tokenizer; None where it is not known
    n_conversations  chats and single answers
    n_tokens         of prompts and answers
    n_documents      tokens of added documents
    missing          a sentence that says what is missing; None where there is enough
    """

    tokenizer: str
    model: str | None
    n_conversations: int
    n_tokens: int
    n_documents: int
    missing: str | None


def read_status(memory: Path) -> list[DataStatus]:
    """The texts in the folder of the memory, the newest first. Raises CacheError."""
    if not memory.is_dir():
        return []
    found = []
    with closing(TextStore.open(memory)) as store:
        for space in store.status():
            if space.namespace:  # texts of a server's key are not the user's
                continue
            texts = read_texts(store, space.tokenizer, documents=True)
            own = [text for text in texts if text.answer < len(text.tokens)]
            missing = None
            try:
                split_texts(texts)
            except InvalidRequest as error:
                missing = error.message
            n_documents = space.n_corpus_tokens
            n_own = count_tokens(texts) - n_documents
            n_conversations = len({text.source for text in own})
            found.append(DataStatus(space.tokenizer, space.model, n_conversations, n_own, n_documents, missing))
    return found


def clear_runs(folder: Path) -> None:
    """Remove the state of all runs that are not complete. Raises CacheError."""
    try:
        for run in folder.glob(f"*/{RUN}*"):
            shutil.rmtree(run, ignore_errors=True)  # a training may write in it at this moment
            if run.exists():
                shutil.rmtree(run)
    except OSError as error:
        raise CacheError(f"{folder} cannot be written: {reason_of(error)}.", hint="Check its permissions.") from error
