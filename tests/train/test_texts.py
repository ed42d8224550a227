"""What is read from the memory to train on, what of it is held out, and when an earlier version is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import InvalidRequest
from edgespec.memory.administration import TextStore
from edgespec.models.versions import BASE, AdaptedDrafts, AdaptedPair
from edgespec.train.evaluate import Matrix, Return, return_to_best
from edgespec.train.texts import (
    MIN_CONVERSATIONS,
    MIN_HELD_OUT,
    MIN_TOKENS,
    RECENT_TOKENS,
    TrainingText,
    count_tokens,
    read_texts,
    split_texts,
)
from tests.memory.texts import make_tokens
from tests.models.test_versions import CARD, writing
from tests.train.stores import TOKENIZER, add_document, add_texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "memory"


def read(folder: Path, namespace: str = "", *, documents: bool = True) -> list[TrainingText]:
    with closing(TextStore.open(folder)) as store:
        return read_texts(store, TOKENIZER, namespace, documents=documents)


def make_texts(n: int, length: int = 1000, answer: int = 100, first: int = 0) -> list[TrainingText]:
    """One text for each of `n` conversations."""
    tokens = np.zeros(length, np.int32)
    return [TrainingText(tokens, 0, answer, f"chat:{first + i}") for i in range(n)]


def test_conversations_and_documents_come_back_as_they_were_stored(folder: Path) -> None:
    first, second, document = make_tokens(1, 500), make_tokens(2, 300), make_tokens(3, 700)
    add_texts(folder, [(first, 70, "chat:1"), (second, 80, "chat:2")])
    add_texts(folder, [(make_tokens(4, 400), 50, "chat:1")], namespace="key")
    add_document(folder, "/notes.txt", document)
    texts = read(folder)
    assert [text.tokens.tolist() for text in texts] == [first, second, document]
    assert [(text.n_lead, text.answer, text.source) for text in texts] == [
        (0, 70, "chat:1"),
        (0, 80, "chat:2"),
        (0, 700, "/notes.txt"),
    ]
    assert all(text.tokens.dtype == np.int32 for text in texts)
    assert [text.source for text in read(folder, documents=False)] == ["chat:1", "chat:2"]
    assert [len(text.tokens) for text in read(folder, namespace="key")] == [400]
    with closing(TextStore.open(folder)) as store:
        assert read_texts(store, "another", documents=True) == []


def test_a_token_is_counted_once(folder: Path) -> None:
    first = make_tokens(1, 640)
    second = first + make_tokens(2, 200)
    add_texts(folder, [(first, 100, "chat:1"), (second, 700, "chat:1")])
    texts = read(folder)
    assert len(texts) == 2 and texts[1].n_lead == 32
    assert count_tokens(texts) == len(second)
    assert texts[1].tokens.tolist() == second[608:] and texts[1].answer == 700 - 608


def test_a_conversation_without_a_name_stays_together(folder: Path) -> None:
    system = make_tokens(0, 640)
    turns = [[*system, *make_tokens(seed, 300)] for seed in (1, 2)]
    longer = [turn + make_tokens(seed + 10, 300) for seed, turn in enumerate(turns)]
    longest = longer[0] + make_tokens(20, 300)
    prompts = [(turn, 700, None) for turn in turns] + [(text, 1000, None) for text in longer] + [(longest, 1300, None)]
    add_texts(folder, prompts)
    sources = [text.source for text in read(folder)]
    assert sources[0] == sources[2] == sources[4] and sources[1] == sources[3], "later turns belong to the first one"
    assert sources[0] != sources[1], "the same system prompt makes no conversation"
    assert sources == [text.source for text in read(folder)]


def test_the_split_keeps_conversations_apart() -> None:
    train, held_out = split_texts(make_texts(100) + make_texts(100, answer=50))
    assert len(train) + len(held_out) == 200
    assert {text.source for text in held_out} == {f"chat:{i}" for i in range(80, 100)}
    assert not {text.source for text in train} & {text.source for text in held_out}


def test_too_few_tokens_are_told_with_their_number() -> None:
    texts = make_texts(30, length=200)
    n_train = 200 * len(split_texts(make_texts(30))[0])
    with pytest.raises(InvalidRequest) as refusal:
        split_texts(texts)
    missing = f"{MIN_TOKENS - n_train:,} more are needed."
    assert refusal.value.message == f"there are {n_train:,} tokens to train on; {missing}"
    assert "memory add" in refusal.value.hint


def test_too_few_conversations_are_told_with_their_number() -> None:
    documents = [TrainingText(np.zeros(50_000, np.int32), 0, 50_000, "/long.py")]
    with pytest.raises(InvalidRequest) as refusal:
        split_texts([*make_texts(MIN_CONVERSATIONS - 3), *documents])
    told = "there are 63,000 tokens of 13 conversations; 16 conversations are needed."
    assert refusal.value.message == told
    with pytest.raises(InvalidRequest, match="there are 0 tokens of 0 conversations; 16"):
        split_texts([])


def numbers(texts: Sequence[TrainingText]) -> set[int]:
    """Those of the conversations, in the order of storing."""
    return {int(text.source.removeprefix("chat:")) for text in texts}


def test_the_newest_conversations_are_held_out() -> None:
    train, held_out = split_texts(make_texts(60))
    assert numbers(held_out) == set(range(48, 60)) and numbers(train) == set(range(48))


def test_older_texts_are_drawn_against_forgetting() -> None:
    train, held_out = split_texts(make_texts(400), newest=True)
    assert numbers(held_out) == set(range(350, 400)), "no more tokens than are measured"
    recent = {number for number in numbers(train) if number >= 300}
    older = numbers(train) - recent
    assert recent == set(range(300, 350)) and len(older) == RECENT_TOKENS / 1000
    assert min(older) < 60 and max(older) > 240, "they come from all times"
    assert numbers(split_texts(make_texts(400), newest=True)[0]) == numbers(train)


@pytest.mark.parametrize("newest", [False, True])
def test_what_was_held_out_once_was_never_trained_on(newest: bool) -> None:
    seen: set[str] = set()
    rng = np.random.default_rng(0)
    texts = [replace(text, tokens=text.tokens[: rng.integers(300, 1000)]) for text in make_texts(800)]
    for n in range(40, 800, 23):
        train, held_out = split_texts(texts[:n], newest=newest)
        assert not seen & {text.source for text in held_out}
        seen |= {text.source for text in train}


def test_documents_are_left_out_and_too_little_is_refused() -> None:
    documents = [replace(text, source=f"/{i}", answer=1000) for i, text in enumerate(make_texts(90, first=500))]
    assert count_tokens(split_texts([*make_texts(60), *documents])[0]) == 48_000 + 90_000
    assert count_tokens(split_texts([*make_texts(60), *documents], newest=True)[0]) == 48_000
    with pytest.raises(InvalidRequest, match="conversation"):
        split_texts([*make_texts(MIN_CONVERSATIONS - 1), *documents], newest=True)
    with pytest.raises(InvalidRequest, match="tokens to train on"):
        split_texts(make_texts(MIN_CONVERSATIONS, length=200), newest=True)
    assert len(split_texts(make_texts(MIN_CONVERSATIONS, length=8000))[1]) == MIN_HELD_OUT


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
