"""Batches: every row that counts comes once in an epoch, with its own teacher row; the seed decides the order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edgespec.adapt.teacher import RowStore, Teacher, TextBatches, cut_windows
from edgespec.adapt.texts import TrainingText
from edgespec.backends.toy import ToyModel, ToySession

RULE = ToyModel(seed=3, vocab_size=97)


def make_texts(seed: int = 0, n: int = 40, longest: int = 300) -> list[TrainingText]:
    rng = np.random.default_rng(seed)
    texts = []
    for i in range(n):
        tokens = rng.integers(0, 97, int(rng.integers(1, longest))).astype(np.int32)
        lead = int(rng.integers(0, len(tokens)))
        texts.append(TrainingText(tokens, lead, lead, str(i), 0.0))
    return texts


def open_rows(texts: list[TrainingText]) -> RowStore:
    teacher = Teacher(ToySession(RULE, context_size=512, check=lambda: None), lambda: None)
    return RowStore(teacher, [text.tokens for text in texts])


@pytest.mark.parametrize("max_length", [16, 64, 512])
def test_each_token_of_a_texts_own_is_predicted_once(max_length: int) -> None:
    texts = make_texts()
    seen: Counter[tuple[int, int]] = Counter()
    for window in cut_windows(texts, max_length):
        assert 0 <= window.start <= window.first < window.stop <= window.start + max_length
        seen.update((window.text, row + 1) for row in range(window.first, window.stop))
    own = {(i, at) for i, text in enumerate(texts) for at in range(max(text.n_lead, 1), len(text.tokens))}
    assert seen == Counter(own)


def test_a_window_repeats_a_quarter_of_the_one_before_it() -> None:
    text = TrainingText(np.arange(200, dtype=np.int32), 0, 0, "", 0.0)
    places = [(each.start, each.first, each.stop) for each in cut_windows([text], 64)]
    assert places == [(0, 0, 64), (48, 64, 112), (96, 112, 160), (144, 160, 199)]


def test_batches_hold_tokens_rows_and_masks() -> None:
    """Each row that counts is found by its context: the tokens before it in its batch, and its teacher row."""
    texts = make_texts(n=12)
    rows = open_rows(texts)
    batches = TextBatches(texts, rows, batch_tokens=256, max_length=64)
    n_rows = 0
    places = {}
    for i, text in enumerate(texts):
        for at in range(max(text.n_lead, 1), len(text.tokens)):
            places[text.tokens[max(0, at - 8) : at].tobytes()] = i, at - 1
    for step in range(len(batches)):
        batch = batches.take(step)
        assert batch.tokens.shape == batch.mask.shape == batch.ids.shape[:2] == batch.log_probs.shape[:2]
        assert batch.tokens.size <= 256 and set(np.unique(batch.mask)) <= {0, 1}
        assert np.isfinite(batch.log_probs).all()
        for b, t in np.argwhere(batch.mask):
            context = batch.tokens[b, max(0, t - 7) : t + 1].tobytes()
            if len(context) == 32:
                i, row = places[context]
                assert (batch.ids[b, t] == rows.read(i).ids[row]).all()
                assert (batch.log_probs[b, t] == rows.read(i).log_probs[row]).all()
        n_rows += int(batch.mask.sum())
    assert n_rows == sum(len(text.tokens) - max(text.n_lead, 1) for text in texts)


def test_the_seed_decides_the_order() -> None:
    texts = make_texts()
    first, same, other = (TextBatches(texts, open_rows(texts), seed=seed) for seed in (1, 1, 2))
    n = len(first)
    orders = [[batches.take(i).tokens.tobytes() for i in range(2 * n)] for batches in (first, same, other)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:n] != orders[0][n:]  # the next epoch has another order
    assert first.take(n + 1).tokens.tobytes() == orders[0][n + 1]  # whatever was taken before
    assert first.key == same.key != other.key
    changed = [*texts[:-1], make_texts(seed=5)[0]]
    assert TextBatches(changed, open_rows(changed), seed=1).key != first.key


def test_texts_without_tokens_of_their_own() -> None:
    text = TrainingText(np.arange(9, dtype=np.int32), 9, 9, "", 0.0)
    with pytest.raises(ValueError, match="no tokens"):
        TextBatches([text], open_rows([text]))
