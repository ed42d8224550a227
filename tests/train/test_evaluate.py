"""Expected tokens of a round against rounds that are simulated or run; and when a gain is more than chance."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.cancel import cancellable
from edgespec.errors import Cancelled, InvalidRequest
from edgespec.train.evaluate import (
    Matrix,
    chain_matrix,
    compare,
    count_rounds,
    expected_tokens,
    find_hits,
    measure_chains,
    read_best,
)
from edgespec.train.texts import TrainingText
from tests.gguf_models import DRAFT


def test_hits_and_chains() -> None:
    text = TrainingText(np.array([9, 9, 1, 2, 3, 4], np.int32), 0, 2, "")
    hits = find_hits(np.array([0, 1, 2, 3, 0, 0], np.int32), text)
    assert hits.tolist() == [True, True, False]
    assert chain_matrix(hits, 2).tolist() == [[1, 1], [1, 0], [0, 0]]
    assert expected_tokens([chain_matrix(hits, 2)]) == 3 and expected_tokens([chain_matrix(hits, 1)]) == 3 / 2
    assert chain_matrix(hits[:0], 3).shape == (0, 3)
    assert expected_tokens([np.array([[0, 0], [1, 0], [0, 0]], np.float32)]) == 3 / 2, "after a miss, one of two"


def test_rounds_of_probabilities() -> None:
    """Against drawn rounds."""
    rng = np.random.default_rng(0)
    matrix = rng.random((12, 3)).astype(np.float32)
    total, n = 0, 20_000
    for _ in range(n):
        at = 0
        while at < 12:
            hits = rng.random(3) < matrix[at]
            at, total = at + int(np.cumprod(hits).sum()) + 1, total + 1
    assert count_rounds(matrix) == pytest.approx(total / n, abs=0.05)


def test_a_network_reads_long_texts_in_windows() -> None:
    """The best tokens of windows, which see less, are mostly those of the whole text."""
    import mlx.core as mx

    from edgespec.train.student import Student

    network = Student.open(DRAFT).network
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 400, 1300).astype(np.int32)
    texts = [TrainingText(tokens, 100, 600, "a"), TrainingText(tokens[:90], 0, 20, "b")]
    long, short = read_best(network, texts)
    whole = np.array(mx.argmax(network(mx.array(tokens[None]))[0], axis=-1))
    assert (short[:-1] == whole[:89]).all() and short[-1] == -1
    assert (long[:99] == -1).all() and long[-1] == -1 and (long[99:-1] >= 0).all()
    assert (long[99:400] == whole[99:400]).mean() > 0.9
    again = TrainingText(tokens[:50], 0, 40, "a")
    found = measure_chains(network, [*texts, again], 3)
    assert {source: matrix.shape for source, matrix in found.items()} == {"a": (699 + 9, 3), "b": (69, 3)}
    assert found["b"][:, 0].tolist() == (whole[20:89] == tokens[21:90]).tolist()

    def cancel() -> None:
        raise Cancelled

    with pytest.raises(Cancelled), cancellable(cancel):
        read_best(network, texts)


def draw(rng: np.random.Generator, rates: np.ndarray, n_positions: int = 60) -> dict[str, Matrix]:
    """Conversations with hits at these rates."""
    return {str(i): chain_matrix(rng.random(n_positions) < rate, 4) for i, rate in enumerate(rates)}


def test_a_clear_gain_is_one() -> None:
    rng = np.random.default_rng(1)
    rates = rng.uniform(0.4, 0.6, 20)
    before, after = draw(rng, rates), draw(rng, rates + 0.2)
    gain = compare(before, after)
    assert gain.is_better and gain.n_conversations == 20
    pooled = [expected_tokens(part.values()) for part in (before, after)]
    assert [gain.before, gain.after] == pytest.approx(pooled, rel=1e-12)
    assert 0 < gain.low < gain.after - gain.before < gain.high
    assert compare(before, after) == gain, "the same texts give the same answer"
    loss = compare(after, before)
    assert not loss.is_better and loss.high < 0


def test_no_gain_is_none() -> None:
    rng = np.random.default_rng(2)
    same = draw(rng, np.full(20, 0.5))
    gain = compare(same, same)
    assert (gain.low, gain.high) == (0, 0) and not gain.is_better
    found = [compare(draw(rng, np.full(20, 0.5)), draw(rng, np.full(20, 0.5))).is_better for _ in range(100)]
    assert sum(found) <= 10, "2.5 in 100 are expected"


def test_conversations_are_resampled_and_not_positions() -> None:
    """One conversation with a large gain among many with a small loss is no evidence."""
    rng = np.random.default_rng(3)
    rates = np.full(12, 0.5)
    changed = rates - 0.05
    changed[0] = 1.0
    before, after = draw(rng, rates), draw(rng, changed)
    before["0"], after["0"] = draw(rng, rates[:1], 3000)["0"], draw(rng, changed[:1], 3000)["0"]
    gain = compare(before, after)
    assert gain.after > gain.before + 1 and not gain.is_better


def test_conversations_without_positions() -> None:
    some, none = np.ones((3, 2), np.float32), np.zeros((0, 2), np.float32)
    assert compare({"a": some, "b": none}, {"a": some, "b": none}).n_conversations == 1
    with pytest.raises(InvalidRequest, match="too short to measure"):
        compare({"b": none}, {"b": none})
