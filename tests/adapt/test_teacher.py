"""The target's rows against plain forwards of every runtime, and the store that keeps them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.adapt.teacher import TOP, RowStore, Teacher, TeacherRows
from edgespec.backends.toy import Kind, ToyModel, ToySession
from edgespec.core.protocols import NO_DRAFT, Session
from edgespec.core.verify import read_prompt
from edgespec.errors import Cancelled
from tests.adapt.runs import cancel_at
from tests.contract.runtimes import LLAMA, MLX, llama_model, mlx_model

RULE = ToyModel(seed=3, vocab_size=200)
TEXT = np.random.default_rng(1).integers(1, 190, 90).astype(np.int32)


def idle() -> None:
    """Never cancels."""


def read_plainly(session: Session, tokens: list[int]) -> np.ndarray:
    """[n, V] log probabilities after each token, by forwards of one row."""
    rows = [read_prompt(session, tokens[:1]).logits(0).astype(np.float64)]
    for token in tokens[1:]:
        rows.append(session.forward(token, NO_DRAFT).logits(0).astype(np.float64))
        session.commit(())
    logits = np.array(rows)
    best = logits.max(-1, keepdims=True)
    return logits - best - np.log(np.exp(logits - best).sum(-1, keepdims=True))


def check_rows(rows: TeacherRows, expected: np.ndarray, tolerance: float) -> None:
    n, k = rows.ids.shape
    assert (n, k) == (len(expected), min(TOP, expected.shape[1]))
    assert rows.ids.dtype == np.int32 and rows.log_probs.dtype == np.float32
    assert all(len(set(row)) == k for row in rows.ids.tolist())
    assert (np.diff(rows.log_probs) <= 0).all()
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
    session, plain = model.open_session(idle), model.open_session(idle)
    teacher = Teacher(session, idle)
    for text in (TEXT.tolist(), TEXT[::-1].tolist(), TEXT[:1].tolist()):  # the session reads one after the other
        check_rows(teacher.read(text), read_plainly(plain, text), tolerance)
        plain.rewind(0)
    session.close()
    plain.close()
    model.close()


@pytest.mark.parametrize("kind", ["tree", "recurrent"])
def test_rows_of_the_toy(kind: Kind) -> None:
    rows = Teacher(ToySession(RULE, kind=kind, context_size=256, check=idle), idle).read(TEXT)
    check_rows(rows, read_plainly(ToySession(RULE, kind=kind, context_size=256, check=idle), TEXT.tolist()), 1e-5)


def test_a_text_longer_than_the_context() -> None:
    """Each row beyond the first context has half a context before it at least."""
    rows = Teacher(ToySession(RULE, context_size=32, check=idle), idle).read(TEXT)
    start, done = 0, 0
    while done < len(TEXT):
        stop = min(start + 32, len(TEXT))
        expected = read_plainly(ToySession(RULE, context_size=32, check=idle), TEXT[start:stop].tolist())
        part = TeacherRows(rows.ids[done:stop], rows.log_probs[done:stop])
        check_rows(part, expected[done - start :], 1e-5)
        start, done = stop - 16, stop


def test_ids_that_the_draft_lacks_are_left_out() -> None:
    rows = Teacher(ToySession(RULE, context_size=256, check=idle), idle, vocab_size=100).read(TEXT)
    expected = read_plainly(ToySession(RULE, context_size=256, check=idle), TEXT.tolist())
    check_rows(rows, expected[:, :100], 1e-5)
    small = Teacher(ToySession(RULE, context_size=256, check=idle), idle, vocab_size=40).read(TEXT)
    assert (np.sort(small.ids) == np.arange(40)).all()


def test_cancelling() -> None:
    check = cancel_at(3)
    teacher = Teacher(ToySession(RULE, kind="recurrent", context_size=256, check=idle), check)
    with pytest.raises(Cancelled):
        for _ in range(3):
            teacher.read(TEXT)


def test_the_store_keeps_what_fits() -> None:
    """Rows that do not fit are computed again, and are the same."""
    n_reads = 0

    def count() -> None:
        nonlocal n_reads
        n_reads += 1

    teacher = Teacher(ToySession(RULE, context_size=256, check=idle), count)
    texts = [TEXT, TEXT[:40], TEXT[40:]]
    expected = [teacher.read(text) for text in texts]
    size = len(TEXT) * TOP * (4 + 2)
    for max_bytes, kept in ((size * 2, {0, 1, 2}), (size, {0}), (0, set())):
        store = RowStore(teacher, texts, max_bytes)
        seen: list[tuple[int, int]] = []
        store.fill(lambda done, total, seen=seen: seen.append((done, total)))
        lengths = [len(texts[i]) for i in sorted(kept)]
        assert seen == [(sum(lengths[: i + 1]), sum(lengths)) for i in range(len(kept))]
        for i, rows in enumerate(expected):
            before = n_reads
            found = store.read(i)
            assert (n_reads == before) == (i in kept)
            assert (found.ids == rows.ids).all()
            assert np.abs(found.log_probs - rows.log_probs).max() < 5e-3 and found.log_probs.dtype == np.float16
