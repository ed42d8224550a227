"""Terms for pairs of tokens: which scores they change, and their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.drafters.recycling import CANDIDATES, FILE, Bigram, find_bigram
from edgespec.errors import CacheError, InvalidModelFile

V = 100


def make_bigram(seed: int = 0, vocab_size: int = V) -> Bigram:
    rng = np.random.default_rng(seed)
    first, second = (rng.standard_normal((vocab_size, 4)).astype(np.float16) for _ in range(2))
    return Bigram(first, second)


def make_row(seed: int = 1, n: int = V) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32) * 3


def test_the_best_tokens_change_by_the_product() -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal((V, 4)).astype(np.float32) for _ in range(2))
    row = make_row()
    before, changed = row.copy(), Bigram(first, second).adjust(row, 7)
    best = set(np.argsort(-row)[:CANDIDATES].tolist())
    for token in range(V):
        term = float(first[7] @ second[token]) if token in best else 0.0
        assert changed[token] == pytest.approx(row[token] + term, abs=1e-5)
    assert row.tolist() == before.tolist()


@pytest.mark.parametrize("vocab_size", [CANDIDATES - 12, V - 10, V + 10])
def test_another_number_of_tokens(vocab_size: int) -> None:
    """Padding ids of a target are left as they are, and follow nothing."""
    bigram, row = make_bigram(vocab_size=vocab_size), make_row(n=V + 5)
    changed = bigram.adjust(row, 3)
    assert (changed[vocab_size:] == row[vocab_size:]).all()
    assert (changed != row).sum() == min(CANDIDATES, vocab_size)
    assert bigram.adjust(row, V + 20).tolist() == row.tolist()


def test_a_file_is_safetensors(tmp_path: Path) -> None:
    bigram = make_bigram()
    bigram.save(tmp_path / FILE)
    arrays = load_file(tmp_path / FILE)
    assert sorted(arrays) == ["markov_w1", "markov_w2"]
    assert all(each.shape == (V, 4) and each.dtype == np.float16 for each in arrays.values())
    assert Bigram.read(tmp_path / FILE).adjust(make_row(), 5).tolist() == bigram.adjust(make_row(), 5).tolist()
    save_file(arrays, tmp_path / "other.safetensors")
    assert (
        Bigram.read(tmp_path / "other.safetensors").adjust(make_row(), 5).tolist()
        == bigram.adjust(make_row(), 5).tolist()
    )


def test_it_lies_beside_its_draft(tmp_path: Path) -> None:
    assert find_bigram(tmp_path / "draft.gguf") is None
    make_bigram().save(tmp_path / FILE)
    found = find_bigram(tmp_path / "draft.gguf")
    assert found is not None and found.vocab_size == V


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / FILE
    make_bigram().save(path)
    data = path.read_bytes()
    for size in (0, 4, 40, len(data) - 2):
        path.write_bytes(data[:size])
        with pytest.raises(InvalidModelFile):
            Bigram.read(path)
    half = np.zeros((V, 4), np.float16)
    for tensors in (
        {"markov_w1": half},
        {"markov_w1": half, "markov_w2": half[1:]},
        {"markov_w1": half, "markov_w2": half.astype(np.float32)},
        {"markov_w1": half, "markov_w2": half + np.float16("nan")},
        {"markov_w1": half[0], "markov_w2": half[0]},
    ):
        save_file(tensors, path)
        with pytest.raises(InvalidModelFile):
            Bigram.read(path)
    with pytest.raises(CacheError):
        Bigram.read(tmp_path / "missing")
