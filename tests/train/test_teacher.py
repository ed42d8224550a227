"""The target's rows against plain forwards of every runtime, and the batches that are made of them."""

from __future__ import annotations

from collections import Counter
from math import inf
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.cancel import cancellable
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT, Session
from edgespec.errors import InvalidRequest
from edgespec.train.parts import Parts, cut_windows, fill_up
from edgespec.train.teacher import TOP, Part, Teacher
from edgespec.train.texts import TrainingText
from tests.contract.runtimes import LLAMA, MLX, llama_model, mlx_model
from tests.train.runs import new_folder

RULE = ToyModel(seed=3, vocab_size=200)
TEXT = np.random.default_rng(1).integers(1, 190, 90).astype(np.int32)


def read_plainly(session: Session, tokens: list[int]) -> np.ndarray:
    """[n, V] log probabilities after each token, by forwards of one row."""
    rows = [read_prompt(session, tokens[:1]).logits(0).astype(np.float64)]
    for token in tokens[1:]:
        rows.append(session.forward(token, NO_DRAFT).logits(0).astype(np.float64))
        session.commit(())
    logits = np.array(rows)
    best = logits.max(-1, keepdims=True)
    return logits - best - np.log(np.exp(logits - best).sum(-1, keepdims=True))


def check_rows(rows: Part, expected: np.ndarray, tolerance: float) -> None:
    n, k = rows.ids.shape
    assert (n, k) == (len(expected), min(TOP, expected.shape[1]))
    assert rows.ids.dtype == np.int32 and rows.log_probs.dtype == np.float16
    assert all(len(set(row)) == k for row in rows.ids.tolist())
    assert (np.diff(rows.log_probs) <= 0).all()
    tolerance += 5e-3  # of half precision
    assert np.abs(np.take_along_axis(expected, rows.ids, -1) - rows.log_probs).max() <= tolerance
    best = -np.sort(-expected, axis=-1)[:, :k]
    assert np.abs(best - rows.log_probs).max() <= tolerance


@pytest.mark.parametrize(
    ("library", "name"),
    [("llama.cpp", "packaged"), ("llama.cpp", "hybrid"), ("mlx", "packaged"), ("mlx", "hybrid")],
)
def test_rows_are_those_of_plain_decoding(library: str, name: str, tmp_path: Path) -> None:
    model = (llama_model if library == "llama.cpp" else mlx_model)(name, tmp_path)
    tolerance = 2 * (LLAMA if library == "llama.cpp" else MLX)[name]
    session, plain = model.open_session(), model.open_session()
    teacher = Teacher(session)
    for text in (TEXT, TEXT[::-1], TEXT[:1]):  # the session reads one after the other
        check_rows(teacher.read(text), read_plainly(plain, text.tolist()), tolerance)
        plain.rewind(0)
    session.close()
    plain.close()
    model.close()


def test_ids_that_the_draft_lacks_are_left_out() -> None:
    rows = Teacher(ToySession(RULE, context_size=256), vocab_size=100).read(TEXT)
    expected = read_plainly(ToySession(RULE, context_size=256), TEXT.tolist())
    check_rows(rows, expected[:, :100], 1e-5)
    small = Teacher(ToySession(RULE, context_size=256), vocab_size=40).read(TEXT)
    assert (np.sort(small.ids) == np.arange(40)).all()


SMALL_RULE = ToyModel(seed=3, vocab_size=97)


def make_texts(seed: int = 0, n: int = 40, longest: int = 300) -> list[TrainingText]:
    rng = np.random.default_rng(seed)
    texts = []
    for i in range(n):
        tokens = rng.integers(0, 97, int(rng.integers(1, longest))).astype(np.int32)
        lead = int(rng.integers(0, len(tokens)))
        texts.append(TrainingText(tokens, lead, lead, str(i)))
    return texts


def open_parts(texts: list[TrainingText], **options: int) -> Parts:
    teacher = Teacher(ToySession(SMALL_RULE, context_size=512))
    return Parts(texts, teacher, new_folder(), **options)


def test_what_fits_is_kept(tmp_path: Path) -> None:
    """Parts that do not fit are read again, and are the same; a later run has those that were kept."""
    n_reads = 0

    def count() -> None:
        nonlocal n_reads
        n_reads += 1

    teacher = Teacher(ToySession(SMALL_RULE, context_size=512))
    texts = [TrainingText(TEXT[:n] % 97, 0, 1, str(n)) for n in (90, 40, 60)]
    expected = [teacher.read(text.tokens[:-1]) for text in texts]
    for max_bytes, kept, reported in ((2**30, {0, 1, 2}, 3), (1, {0}, 1), (0, set(), 1)):
        folder = tmp_path / str(max_bytes)
        folder.mkdir()
        parts = Parts(texts, teacher, folder, max_bytes=max_bytes)
        seen: list[tuple[int, int]] = []
        parts.fill(lambda done, total, seen=seen: seen.append((done, total)))
        assert seen == [(89, 187), (128, 187), (187, 187)][:reported]
        for i, part in enumerate(expected):
            before = n_reads
            with cancellable(count):
                found = parts.read(i)
            assert (n_reads == before) == (i in kept)
            assert (found.ids == part.ids).all() and (found.log_probs == part.log_probs).all()
    whole = tmp_path / str(2**30)
    assert {file.stat().st_mode & 0o077 for file in whole.iterdir()} == {0}
    before, damaged = n_reads, max(whole.iterdir(), key=lambda file: file.stat().st_size)
    later = Parts(texts, teacher, whole)
    with cancellable(count):
        assert later.read(1).ids.tolist() == expected[1].ids.tolist() and n_reads == before
    damaged.write_bytes(damaged.read_bytes()[:300])
    with cancellable(count):
        assert later.read(0).ids.tolist() == expected[0].ids.tolist() and n_reads > before
    with pytest.raises(InvalidRequest, match="was removed while it ran"):
        Parts(texts, teacher, tmp_path / "missing").fill(lambda done, total: None)


def test_what_is_not_read_in_time_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run that goes on has what was read, and no more."""
    monkeypatch.setattr("edgespec.train.parts._LEAST_READ", 100)
    teacher = Teacher(ToySession(SMALL_RULE, context_size=512))
    texts = [TrainingText(TEXT[:n] % 97, 0, 1, str(n)) for n in (90, 40, 60, 50)]
    batches: list[int] = []
    for limit_s, n_read in ((0.0, 2), (0.0, 2), (inf, 4), (0.0, 4)):
        parts = Parts(texts, teacher, tmp_path, batch_tokens=64)
        parts.fill(lambda done, total: None, limit_s)
        assert [text.source for text in parts.used_texts] == ["90", "40", "60", "50"][:n_read]
        assert sorted(len(part.tokens) for step in range(len(parts)) for part in parts.take(step)) == sorted(
            [89, 39, 59, 49][:n_read]
        )
        batches.append(len(parts))
    assert batches == [2, 2, 4, 4]


def test_a_pause_is_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still in pauses, and the last texts are read where it does."""
    monkeypatch.setattr("edgespec.train.parts._LEAST_READ", 1)
    teacher = Teacher(ToySession(SMALL_RULE, context_size=512))
    texts = [TrainingText(TEXT[:n] % 97, 0, 1, str(n)) for n in (90, 40)]
    for name, second_s, n_read in (("pause", 0.0, 2), ("work", 9.0, 1)):
        now = iter([0.0, 0.0, second_s])
        folder = tmp_path / name
        folder.mkdir()
        parts = Parts(texts, teacher, folder)
        parts.fill(lambda done, total: None, 5.0, lambda now=now: next(now))  # type: ignore[misc]
        assert len(parts.used_texts) == n_read


@pytest.mark.parametrize("max_length", [16, 64, 512])
def test_each_token_of_a_texts_own_is_predicted_once(max_length: int) -> None:
    texts = make_texts()
    seen: Counter[tuple[int, int]] = Counter()
    for window in cut_windows(texts, max_length):
        assert 0 <= window.start <= window.first < window.stop <= window.start + max_length
        seen.update((window.text, row + 1) for row in range(window.first, window.stop))
    own = {(i, at) for i, text in enumerate(texts) for at in range(max(text.n_lead, 1), len(text.tokens))}
    assert seen == Counter(own)


def test_batches_hold_tokens_rows_and_masks() -> None:
    """Each row that counts is what the target says after the window's tokens up to it."""
    texts = make_texts(n=12)
    parts = open_parts(texts, batch_tokens=256, max_length=64)
    teacher = Teacher(ToySession(SMALL_RULE, context_size=512))
    n_rows = 0
    for step in range(len(parts)):
        drawn = parts.take(step)
        batch = fill_up(drawn)
        assert batch.tokens.shape == batch.mask.shape == batch.ids.shape[:2] == batch.log_probs.shape[:2]
        assert batch.tokens.size <= 256 and set(np.unique(batch.mask)) <= {0, 1}
        for row, part in enumerate(drawn):
            n, alone = len(part.tokens), teacher.read(part.tokens)
            assert (batch.tokens[row, :n] == part.tokens).all() and not batch.mask[row, n:].any()
            assert (batch.ids[row, :n] == alone.ids).all() and (batch.log_probs[row, :n] == alone.log_probs).all()
            assert (batch.mask[row, :n] == part.mask).all()
        n_rows += int(batch.mask.sum())
    assert n_rows == sum(len(text.tokens) - max(text.n_lead, 1) for text in texts)


def test_the_seed_decides_the_order() -> None:
    texts = make_texts()
    first, same, other = (open_parts(texts, seed=seed) for seed in (1, 1, 2))
    n = len(first)
    orders = [[fill_up(parts.take(i)).tokens.tobytes() for i in range(2 * n)] for parts in (first, same, other)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:n] != orders[0][n:]  # the next epoch has another order
    assert fill_up(first.take(n + 1)).tokens.tobytes() == orders[0][n + 1]  # whatever was taken before


def test_texts_without_tokens_of_their_own() -> None:
    text = TrainingText(np.arange(9, dtype=np.int32), 9, 9, "")
    with pytest.raises(ValueError, match="no tokens"):
        open_parts([text])
