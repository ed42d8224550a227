"""Factors on a draft's logits: the acceptance of drawn tokens, the best factor, and that runtimes apply it."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest

from edgespec.adapt.calibration import SCALES, accept_by_scale, apply_scale, choose_scale, measure_draws
from edgespec.adapt.student import Student
from edgespec.adapt.teacher import RowStore, Teacher, TeacherRows
from edgespec.adapt.texts import TrainingText
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Session
from edgespec.errors import DraftRefused
from tests.adapt.drafts import TEXT, make_draft, read_network, read_runtime
from tests.models import DRAFT, find_trained

SCALE = float(SCALES[20])  # 1.19
OPTIONS = LoadOptions(context_size=256, threads=1)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z.astype(np.float64) - z.max())
    return e / e.sum()


def open_session(path: Path) -> Session:
    return load(path, OPTIONS).open_session()


def test_acceptance_by_factor() -> None:
    """Against the sum over all tokens, of which those besides the known ones count as one."""
    rng = np.random.default_rng(0)
    logits, target = (rng.standard_normal((70, 40)).astype(np.float32) * 2 for _ in range(2))
    ids = np.argsort(-target, axis=1)[:, :6].astype(np.int32)
    log_probs = np.log([softmax(row)[own] for row, own in zip(target, ids, strict=True)])
    found = accept_by_scale(logits, TeacherRows(ids, log_probs), [0.5, 1.0, 1.7])
    for i, scale in enumerate([0.5, 1.0, 1.7]):
        for row in range(70):
            p, q = softmax(target[row])[ids[row]], softmax(logits[row] * scale)[ids[row]]
            expected = np.minimum(p, q).sum() + min(1 - p.sum(), 1 - q.sum())
            assert found[i, row] == pytest.approx(expected, abs=1e-6)


def test_the_factor_that_was_taken_away_is_found(tmp_path: Path) -> None:
    """A target that is the draft with other weights of its last norm."""
    base = find_trained("draft")
    student = Student.open(base)
    apply_scale(student.network, SCALE)
    student.save(tmp_path / "target.gguf")
    tokens = np.array([0, *open_session(base).rollout([0], 120, 4096)[0].tokens], np.int32)
    texts = [TrainingText(tokens, 0, 4, "a", 0.0), TrainingText(tokens[:30], 20, 25, "b", 0.0)]
    rows = RowStore(Teacher(open_session(tmp_path / "target.gguf"), lambda: None), [text.tokens for text in texts])
    network = Student.open(base).network
    before = measure_draws(network, texts, rows, 3, lambda: None)
    assert choose_scale(network, texts, rows, 3, lambda: None) == SCALE
    apply_scale(network, SCALE)
    after = measure_draws(network, texts, rows, 3, lambda: None)
    assert {name: each.shape for name, each in after.items()} == {"a": (116, 3), "b": (4, 3)}
    assert after["a"][:-3].min() > 0.97 > before["a"].mean()
    assert after["a"][-1].tolist() == [pytest.approx(1, abs=0.03), 0, 0], "behind the end nothing is accepted"


@pytest.mark.parametrize("name", ["packaged", "llama.gguf", "qwen2.gguf", "qwen3.gguf", "tied-folder", "4-bit-folder"])
def test_runtimes_apply_the_factor(name: str, tmp_path: Path) -> None:
    path, tolerance = make_draft(name, tmp_path)
    student = Student.open(path)
    apply_scale(student.network, 1.5)
    student.save(tmp_path / "saved")
    assert np.abs(read_runtime(tmp_path / "saved") - 1.5 * read_runtime(path)).max() <= 3 * tolerance
    assert np.abs(read_network(student) - 1.5 * read_network(Student.open(path))).max() < 1e-3


def test_a_network_without_a_last_norm() -> None:
    with pytest.raises(DraftRefused, match="no last norm"):
        apply_scale(nn.Linear(2, 2), 2.0)


def test_a_text_of_the_packaged_draft_is_not_needed() -> None:
    """Without rounds nothing is scaled."""
    text = TrainingText(np.array(TEXT[:3], np.int32), 0, 3, "a", 0.0)
    rows = RowStore(Teacher(open_session(DRAFT), lambda: None), [text.tokens])
    assert choose_scale(Student.open(DRAFT).network, [text], rows, 3, lambda: None) == 1.0
