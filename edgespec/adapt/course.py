"""What a draft is trained on: all texts, or the newest ones again and again; and which version training starts from.

Of the newest texts, the last conversations measure the draft before it is trained on them. A draft in use that predicts
them worse than an earlier version is given up for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from edgespec.adapt.evaluate import Matrix, compare
from edgespec.adapt.texts import (
    HELD_OUT_SHARE,
    MIN_CONVERSATIONS,
    MIN_HELD_OUT,
    RUN,
    Split,
    TrainingText,
    require_conversations,
    require_tokens,
    split_texts,
)
from edgespec.registry.adapted import BASE, AdaptedPair, Gain

RECENT_TOKENS = 50_000
"""The newest tokens, of which a part is held out. As many older ones are trained on, against forgetting."""

Measure = Callable[[Path], Mapping[str, Matrix]]
"""The matrices of the draft at a path on the texts that are held out."""


@dataclass(frozen=True, slots=True)
class Return:
    """Another version was put in use: it predicts the newest texts better than the one that was, by `gain`."""

    version: int
    gain: Gain


class Course(Protocol):
    """Which texts are trained on, and from which version on.

    folder  of a run's state, in that of the pair
    """

    folder: ClassVar[str]

    def split(self, texts: Sequence[TrainingText]) -> Split:
        """What is trained on and what is held out. Raises InvalidRequest for too little."""

    def choose_start(self, pair: AdaptedPair, base: Path, measure: Measure) -> Return | None:
        """Put the version in use that training starts from; None where it is in use. Raises EdgespecError."""


class AllTexts:
    """All texts; those that are held out never change sides. Training starts from the version in use."""

    folder: ClassVar[str] = RUN

    def split(self, texts: Sequence[TrainingText]) -> Split:
        return split_texts(texts)

    def choose_start(self, pair: AdaptedPair, base: Path, measure: Measure) -> Return | None:
        return None


class NewestTexts:
    """The newest texts, held out by time. Training starts from the version that predicts them best."""

    folder: ClassVar[str] = f"{RUN}-newest"

    def split(self, texts: Sequence[TrainingText]) -> Split:
        return split_newest(texts)

    def choose_start(self, pair: AdaptedPair, base: Path, measure: Measure) -> Return | None:
        return return_to_best(pair, base, measure)


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
    newest = _take(list(sizes)[::-1], sizes, MIN_CONVERSATIONS)
    older = list(sizes)[: len(sizes) - len(newest)]
    drawn = _take([older[i] for i in np.random.default_rng(0).permutation(len(older))], sizes, 0)
    held_out = set(newest[: max(MIN_HELD_OUT, round(HELD_OUT_SHARE * len(newest)))])
    train = {*newest, *drawn} - held_out
    split = Split([text for text in texts if text.source in train], [text for text in texts if text.source in held_out])
    require_tokens(split.train)
    return split


def _take(sources: Sequence[str], sizes: Mapping[str, int], at_least: int) -> list[str]:
    """The first sources that have RECENT_TOKENS together."""
    taken: list[str] = []
    total = 0
    for source in sources:
        if total >= RECENT_TOKENS and len(taken) >= at_least:
            break
        taken.append(source)
        total += sizes[source]
    return taken


def return_to_best(pair: AdaptedPair, base: Path, measure: Measure) -> Return | None:
    """Put the base draft or the version before in use where it predicts better than the one in use, beyond chance.

    Raises CacheError, InvalidModelFile, and what `measure` raises.
    """
    active = pair.active()
    if active is None:
        return None
    present = measure(active.path)
    before = [version for version, card in pair.versions().items() if card and version < active.card.version][-1:]
    best: Return | None = None
    for version in (BASE, *before):
        gain = compare(present, measure(base if version == BASE else pair.read(version).path))
        if gain.is_better and (best is None or gain.after > best.gain.after):
            best = Return(version, gain)
    if best is not None:
        pair.use(best.version)
    return best
