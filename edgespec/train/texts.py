"""The stored texts that a draft learns from, and those that are held out to measure the gain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.arrays import Ints
from edgespec.errors import InvalidRequest
from edgespec.memory.administration import TextStore
from edgespec.memory.texts import BLOCK, MAX_MATCH, StoredText
from edgespec.units import count

MIN_TOKENS = 10_000
"""Tokens that training needs, those of documents included."""

MIN_CONVERSATIONS = 16
"""Conversations that training needs."""

MIN_HELD_OUT = 8
"""Conversations that measure the gain. With 5, chance passes for a gain in 8 of 100 cases, with 8 or more in 4 or 5."""

HELD_OUT_SHARE = 0.2
HELD_OUT_TOKENS = 50_000
"""Tokens that suffice for intervals of a few percent, and that are measured without a long wait."""

RECENT_TOKENS = 50_000
"""The newest tokens that are trained on. Beside them as many older ones are, against forgetting."""


@dataclass(frozen=True, slots=True)
class TrainingText:
    """A run of tokens of a conversation or document.

    tokens  [n] int32
    n_lead  the first so many are context only: another text has them too
    answer  the position where the model's answer starts; n if there is none, as in documents
    source  names the conversation or document, the same for all of its texts
    """

    tokens: Ints
    n_lead: int
    answer: int
    source: str

    @property
    def n_new(self) -> int:
        """The tokens that no other text has."""
        return len(self.tokens) - self.n_lead


def read_texts(store: TextStore, tokenizer: str, namespace: str = "", *, documents: bool) -> list[TrainingText]:
    """The stored texts in the order of storing, with documents or without. Raises CacheError."""
    by_end: dict[bytes, str] = {}
    return [
        TrainingText(text.tokens.astype(np.int32), text.n_lead, text.answer, _name_source(text, by_end))
        for text in store.texts(tokenizer, namespace)
        if documents or not text.origin.is_corpus
    ]


def split_texts(
    texts: Sequence[TrainingText], *, newest: bool = False
) -> tuple[list[TrainingText], list[TrainingText]]:
    """(texts to train on, texts of other conversations to measure the gain with).

    The conversations that began last are held out, about HELD_OUT_SHARE of them, MIN_HELD_OUT at least: when texts are
    added, none that was trained on is held out. Documents never are, because no model has written them.

    With `newest` one trains on the other conversations of about RECENT_TOKENS that began last, and on as many older
    tokens. Raises InvalidRequest if there are too few conversations, or too few tokens to train on.
    """
    answered = {text.source for text in texts if text.answer < len(text.tokens)}
    sizes: dict[str, int] = {}  # of conversations; the first text of one decides its place
    for text in texts:
        if text.source in answered:
            sizes[text.source] = sizes.get(text.source, 0) + text.n_new
    if len(sizes) < MIN_CONVERSATIONS:
        raise InvalidRequest(
            f"there are {count(count_tokens(texts), 'token')} of {count(len(sizes), 'conversation')};"
            f" {MIN_CONVERSATIONS} conversations are needed.",
            hint="Use the model for longer: every chat and every `edgespec run` counts.",
        )
    latest = list(sizes)[::-1]
    last_fifth = latest[: max(MIN_HELD_OUT, round(HELD_OUT_SHARE * len(latest)))]
    held_out = set(_take(last_fifth, sizes, HELD_OUT_TOKENS, MIN_HELD_OUT))
    trained = {text.source for text in texts} - held_out
    if newest:
        others = latest[len(held_out) :]
        recent = _take(others, sizes, RECENT_TOKENS)
        older = np.random.default_rng(0).permutation(others[len(recent) :]).tolist()
        trained = {*recent, *_take(older, sizes, RECENT_TOKENS)}
    train = [text for text in texts if text.source in trained]
    if (missing := MIN_TOKENS - count_tokens(train)) > 0:
        raise InvalidRequest(
            f"there are {count_tokens(train):,} tokens to train on; {missing:,} more are needed.",
            hint="Use the model for longer, or add documents with `edgespec memory add`.",
        )
    return train, [text for text in texts if text.source in held_out]


def count_tokens(texts: Iterable[TrainingText]) -> int:
    """The tokens of `texts`, each counted once."""
    return sum(text.n_new for text in texts)


def _take(sources: Sequence[str], sizes: Mapping[str, int], n_tokens: int, at_least: int = 0) -> list[str]:
    """The first sources that have `n_tokens` together, and at least `at_least` of them."""
    taken: list[str] = []
    total = 0
    for source in sources:
        if total >= n_tokens and len(taken) >= at_least:
            break
        taken.append(source)
        total += sizes[source]
    return taken


def _name_source(text: StoredText, by_end: dict[bytes, str]) -> str:
    """Name the source of a text; texts come in the order of storing.

    One without a source is a conversation of its own, unless it goes on after the answer of an earlier one. That is
    seen by the end of a block of the earlier text, which is the lead of the later one: `by_end` has the sources by the
    ends of blocks that have a part of an answer.
    """
    if text.origin.source is not None:
        return text.origin.source
    lead = text.tokens[: text.n_lead]
    known = by_end.get(lead.tobytes()) if len(lead) == MAX_MATCH else None
    source = known or f"text:{text.keys[0]:016x}"
    for end in range(text.n_lead + BLOCK, len(text.tokens) + 1, BLOCK):
        if end > text.answer:
            by_end[text.tokens[end - MAX_MATCH : end].tobytes()] = source
    return source
