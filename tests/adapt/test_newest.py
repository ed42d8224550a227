"""Training on the newest texts: what is held out, and when an earlier version is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.adapt.evaluate import Matrix, Return, return_to_best
from edgespec.adapt.texts import (
    MIN_CONVERSATIONS,
    MIN_HELD_OUT,
    RECENT_TOKENS,
    TrainingText,
    count_tokens,
    split_newest,
)
from edgespec.errors import InvalidRequest
from edgespec.registry.adapted import BASE, AdaptedDrafts, AdaptedPair
from tests.registry.test_adapted import CARD, writing


def make_texts(n: int, length: int = 1000, first: int = 0) -> list[TrainingText]:
    """One text for each of `n` conversations, stored a second apart."""
    tokens = np.zeros(length, np.int32)
    return [TrainingText(tokens, 0, 100, f"chat:{i}", float(i)) for i in range(first, first + n)]


def begins(texts: Sequence[TrainingText]) -> set[float]:
    return {text.time for text in texts}


def test_the_newest_conversations_are_held_out() -> None:
    split = split_newest(make_texts(60))
    assert begins(split.held_out) == set(range(50, 60)) and begins(split.train) == set(range(50))


def test_older_texts_are_drawn_against_forgetting() -> None:
    split = split_newest(make_texts(400))
    assert begins(split.held_out) == set(range(390, 400))
    recent = {time for time in begins(split.train) if time >= 350}
    older = begins(split.train) - recent
    assert recent == set(range(350, 390)) and len(older) == RECENT_TOKENS / 1000
    assert min(older) < 60 and max(older) > 290, "they come from all times"
    assert begins(split_newest(make_texts(400)).train) == begins(split.train)


def test_a_conversation_is_on_one_side_and_counts_from_its_beginning() -> None:
    texts = make_texts(60)
    again = [replace(text, time=100.0 + text.time) for text in (texts[3], texts[55])]
    split = split_newest([*texts, *again])
    assert {"chat:3", "chat:55"} & {text.source for text in split.held_out} == {"chat:55"}
    assert not {text.source for text in split.held_out} & {text.source for text in split.train}
    assert len(split.held_out) == 11 and len(split.train) == 51


def test_what_was_held_out_once_was_never_trained_on() -> None:
    seen: set[str] = set()
    for n in range(20, 200, 7):
        split = split_newest(make_texts(n))
        assert not seen & {text.source for text in split.held_out}
        seen |= {text.source for text in split.train}


def test_documents_are_left_out_and_too_little_is_refused() -> None:
    documents = [replace(text, source=f"/{i}", answer=1000) for i, text in enumerate(make_texts(90, first=500))]
    split = split_newest([*make_texts(60), *documents])
    assert count_tokens([*split.train, *split.held_out]) == 60_000
    with pytest.raises(InvalidRequest, match="conversation"):
        split_newest([*make_texts(MIN_CONVERSATIONS - 1), *documents])
    with pytest.raises(InvalidRequest, match="tokens to train on"):
        split_newest(make_texts(MIN_CONVERSATIONS, length=200))
    assert len(split_newest(make_texts(MIN_CONVERSATIONS, length=5000)).held_out) == MIN_HELD_OUT


@pytest.fixture
def pair(tmp_path: Path) -> AdaptedPair:
    """Versions 1 to 3, of which the last one is in use; the base draft has the text 'base'."""
    (tmp_path / "base").write_bytes(b"base")
    pair = AdaptedDrafts(tmp_path / "adapted").pair(tmp_path / "base", tmp_path / "base")
    for version in (1, 2, 3):
        pair.add(CARD, writing(str(version).encode()))
    return pair


def returns(pair: AdaptedPair, tmp_path: Path, rates: Mapping[str, float]) -> Return | None:
    """With drafts that are right at these rates; texts are the drafts in use at a time."""

    def measure(path: Path) -> dict[str, Matrix]:
        rng, rate = np.random.default_rng(1), rates[path.read_text()]
        return {f"chat:{i}": (rng.random((80, 4)) < rate).astype(np.float32) for i in range(12)}

    return return_to_best(pair, tmp_path / "base", measure)


def test_a_draft_that_has_become_worse_is_given_up(pair: AdaptedPair, tmp_path: Path) -> None:
    assert returns(pair, tmp_path, {"base": 0.5, "2": 0.55, "3": 0.6}) is None and pair.active_number() == 3
    assert returns(pair, tmp_path, {"base": 0.4, "2": 0.602, "3": 0.6}) is None, "that may be chance"
    found = returns(pair, tmp_path, {"base": 0.7, "2": 0.8, "3": 0.6})
    assert found is not None and found.version == pair.active_number() == 2 and found.gain.low > 0
    found = returns(pair, tmp_path, {"base": 0.7, "1": 0.6, "2": 0.5})
    assert found is not None and found.version == pair.active_number() == BASE
    assert returns(pair, tmp_path, {"base": 0.1}) is None
