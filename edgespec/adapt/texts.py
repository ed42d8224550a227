"""The stored texts that a draft learns from, and those that are held out to measure the gain."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from edgespec.core.sampling import Ints
from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.memory.store import TextStore
from edgespec.memory.texts import BLOCK, MAX_MATCH, StoredText

MIN_TOKENS = 10_000
"""Tokens that training needs, those of documents included."""
MIN_CONVERSATIONS = 16
"""Conversations that training needs."""
MIN_HELD_OUT = 8
"""Conversations that measure the gain. With 5, chance passes for a gain in 8 of 100 cases, with 8 or more in 4 or 5."""
HELD_OUT_SHARE = 0.2
RECENT_TOKENS = 50_000
"""The newest tokens, of which a part is held out. As many older ones are trained on, against forgetting."""


@dataclass(frozen=True, slots=True)
class TrainingText:
    """A run of tokens of a conversation or document.

    tokens  [n] int32
    n_lead  the first so many are context only: another text has them too
    answer  the position where the model's answer starts; n where there is none, as in documents
    source  names the conversation or document, the same for all of its texts
    time    when it was stored, in seconds since the epoch
    """

    tokens: Ints
    n_lead: int
    answer: int
    source: str
    time: float

    @property
    def n_new(self) -> int:
        """The tokens that no other text has."""
        return len(self.tokens) - self.n_lead


@dataclass(frozen=True, slots=True)
class Split:
    """Texts to train on, and texts of other conversations to measure the gain with."""

    train: list[TrainingText]
    held_out: list[TrainingText]


def read_texts(store: TextStore, tokenizer: str, namespace: str = "", *, documents: bool) -> list[TrainingText]:
    """The stored texts in the order of storing, with documents or without. Raises CacheError."""
    sources = _Sources()
    return [
        TrainingText(text.tokens.astype(np.int32), text.n_lead, text.answer, sources.name(text), text.origin.time)
        for text in store.texts(tokenizer, namespace)
        if documents or not text.origin.is_corpus
    ]


def split_texts(texts: Sequence[TrainingText]) -> Split:
    """Hold out about HELD_OUT_SHARE of the conversations, MIN_HELD_OUT at least, by a hash of their sources.

    When texts are added, no conversation that was trained on is held out. Documents never are: no model has written
    them. Raises InvalidRequest where there are too few conversations, or too few tokens to train on.
    """
    answered = sorted({text.source for text in texts if text.answer < len(text.tokens)}, key=_draw)
    require_conversations(texts, len(answered))
    held_out = {source for i, source in enumerate(answered) if i < MIN_HELD_OUT or _draw(source) < HELD_OUT_SHARE}
    split = Split([], [])
    for text in texts:
        (split.held_out if text.source in held_out else split.train).append(text)
    require_tokens(split.train)
    return split


def require_conversations(texts: Sequence[TrainingText], n: int) -> None:
    """Raise InvalidRequest where `n`, the conversations in `texts`, are too few."""
    if (missing := MIN_CONVERSATIONS - n) > 0:
        raise InvalidRequest(
            f"there are {count_tokens(texts):,} tokens of {n} conversations; {missing} more conversations are needed.",
            hint="Use the model for longer: every chat and every `edgespec run` counts.",
        )


def require_tokens(texts: Sequence[TrainingText]) -> None:
    """Raise InvalidRequest where `texts`, those to train on, have too few tokens."""
    n_train = count_tokens(texts)
    if (missing := MIN_TOKENS - n_train) > 0:
        raise InvalidRequest(
            f"there are {n_train:,} tokens to train on; {missing:,} more are needed.",
            hint="Use the model for longer, or add documents with `edgespec memory add`.",
        )


def count_tokens(texts: Iterable[TrainingText]) -> int:
    """The tokens of `texts`, each counted once."""
    return sum(text.n_new for text in texts)


def split_newest(texts: Sequence[TrainingText]) -> Split:
    """Hold out the conversations that began last, and train on those before them.

    The newest conversations have about RECENT_TOKENS; the last fifth of them is held out, MIN_HELD_OUT at least. Older
    ones are drawn up to as many tokens. Documents are left out. A conversation that is held out has never been trained
    on by an earlier split. Raises InvalidRequest where there are too few conversations, or tokens to train on.
    """
    answered = {text.source for text in texts if text.answer < len(text.tokens)}
    sizes: dict[str, int] = {}
    for text in texts:  # the first text of a conversation decides its place
        if text.source in answered:
            sizes[text.source] = sizes.get(text.source, 0) + text.n_new
    require_conversations(texts, len(answered))
    newest = _take(list(sizes)[::-1], sizes, RECENT_TOKENS, MIN_CONVERSATIONS)
    older = list(sizes)[: len(sizes) - len(newest)]
    drawn = _take([older[i] for i in np.random.default_rng(0).permutation(len(older))], sizes, RECENT_TOKENS)
    held_out = set(newest[: max(MIN_HELD_OUT, round(HELD_OUT_SHARE * len(newest)))])
    train = {*newest, *drawn} - held_out
    split = Split([text for text in texts if text.source in train], [text for text in texts if text.source in held_out])
    require_tokens(split.train)
    return split


def take_latest(texts: Sequence[TrainingText], n_tokens: int) -> list[TrainingText]:
    """The latest texts, of whole conversations, of about `n_tokens`."""
    sizes: dict[str, int] = {}
    for text in reversed(texts):
        sizes[text.source] = sizes.get(text.source, 0) + text.n_new
    kept = set(_take(list(sizes), sizes, n_tokens))
    return [text for text in texts if text.source in kept]


def _take(sources: Sequence[str], sizes: Mapping[str, int], n_tokens: int, at_least: int = 0) -> list[str]:
    """The first sources that have `n_tokens` together, but `at_least` so many."""
    taken: list[str] = []
    total = 0
    for source in sources:
        if total >= n_tokens and len(taken) >= at_least:
            break
        taken.append(source)
        total += sizes[source]
    return taken


@dataclass(frozen=True, slots=True)
class TextSelection:
    """Says which texts are trained on, and which measure the gain.

    folder     of a run's state, in that of the pair
    split      what is trained on and what is held out. Raises InvalidRequest for too little
    from_best  whether training starts from the version that predicts the held-out texts best; else from the one in use
    """

    folder: str
    split: Callable[[Sequence[TrainingText]], Split]
    from_best: bool


RUN = "training"
"""The folder, in that of a pair, of a run that is not complete; other kinds of runs append to the name."""
ALL_TEXTS = TextSelection(RUN, split_texts, from_best=False)
NEWEST_TEXTS = TextSelection(f"{RUN}-newest", split_newest, from_best=True)


class _Sources:
    """Names for the sources of texts, which come in the order of storing.

    A text without a source is a conversation of its own, unless it goes on after the answer of an earlier one. That is
    seen by the end of a block of the earlier text: it is the lead of the later one.
    """

    def __init__(self) -> None:
        self._by_end: dict[bytes, str] = {}  # end of a block that has a part of an answer -> source

    def name(self, text: StoredText) -> str:
        if text.origin.source is not None:
            return text.origin.source
        lead = text.tokens[: text.n_lead]
        known = self._by_end.get(lead.tobytes()) if len(lead) == MAX_MATCH else None
        source = known or f"text:{text.keys[0]:016x}"
        for end in range(text.n_lead + BLOCK, len(text.tokens) + 1, BLOCK):
            if end > text.answer:
                self._by_end[text.tokens[end - MAX_MATCH : end].tobytes()] = source
        return source


def _draw(source: str) -> float:
    """A number in [0, 1) for a source."""
    return int.from_bytes(blake2b(source.encode(), digest_size=8).digest()) / 2**64


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
