"""Training of MTP and EAGLE heads: passes over a text are drafts of the runtime, and trained heads are run by it."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.heads.target_parts import read_target
from edgespec.backends.mlx.model import MlxModel
from edgespec.core.decoding import read_prompt
from edgespec.errors import DraftRefused
from edgespec.formats.head_file import read_head
from edgespec.train.evaluate import expected_tokens
from edgespec.train.head_student import HeadStudent, find_known, measure_heads, recursion
from edgespec.train.parts import Parts
from edgespec.train.teacher import Teacher
from edgespec.train.texts import TrainingText
from tests.gguf_models import REPOSITORY
from tests.mlx_models import DENSE, load_target, make_model
from tests.train.runs import new_folder

HEADS = REPOSITORY / "tests" / "fixtures" / "heads"
KINDS = ("mtp", "eagle", "eagle3")
DEPTH = 3


def folder_of(kind: str) -> Path:
    return HEADS / f"{kind}-python-6m"


@pytest.fixture(scope="module")
def target() -> Iterator[MlxModel]:
    model = load_target()
    yield model
    model.close()


@pytest.fixture(scope="module")
def text(target: MlxModel) -> TrainingText:
    """What the packaged target says after a function's header."""
    prompt = target.tokenizer.encode("def read_lines(path):\n", parse_special=False)
    chain, _ = target.open_session().rollout(prompt, 60, target.tokenizer.vocab_size)
    return TrainingText(np.array([*prompt, *chain.tokens], np.int32), 0, len(prompt), "a")


def open_student(kind: str, target: MlxModel, folder: Path | None = None) -> HeadStudent:
    folder = folder or folder_of(kind)
    spec = read_head(folder)
    assert spec is not None
    return HeadStudent(folder, spec, read_target(target.network), target.layer_count)


def open_texts(student: HeadStudent, target: MlxModel, *texts: TrainingText, **options: int) -> Parts:
    session = target.open_session()
    teacher = Teacher(session, layers=student.layers)
    return Parts(texts, teacher, new_folder(), **options)


def measure(student: HeadStudent, target: MlxModel, text: TrainingText) -> np.ndarray:
    found = measure_heads(student.network, open_texts(student, target, text), DEPTH, 1)
    assert found.keys() == {"a"}
    return found["a"]


def run_drafts(kind: str, target: MlxModel, folder: Path, text: TrainingText) -> np.ndarray:
    """[positions, DEPTH] the tokens that the head proposes in use, at each position of the answer but its first."""
    spec = read_head(folder)
    assert spec is not None
    head, session = target.load_head(spec, folder), target.open_session()
    draft = head.open_session(session)
    tokens = text.tokens.tolist()
    draft.begin(tokens[: text.answer])
    proposed = []
    for position in range(text.answer + 1, len(tokens)):
        read_prompt(session, tokens[:position])
        chain, _ = draft.rollout(tokens[:position], position, DEPTH)
        proposed.append(chain.tokens.tolist())
    draft.close()
    head.close()
    return np.array(proposed)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_over_a_text_are_drafts(kind: str, target: MlxModel, text: TrainingText) -> None:
    """The accepted part of each draft in use is what the passes say."""
    matrix = measure(open_student(kind, target), target, text)
    proposed = run_drafts(kind, target, folder_of(kind), text)
    true = np.concatenate([text.tokens, np.full(DEPTH, -1)])
    true = np.stack([true[text.answer + 1 + i : text.answer + 1 + i + DEPTH] for i in range(len(proposed))])
    accepted = np.cumprod(proposed == true, axis=1)
    assert np.cumprod(matrix, axis=1).tolist() == accepted.tolist()
    assert 0 < accepted[:, -1].sum() < len(accepted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_is_saved_and_run(kind: str, target: MlxModel, text: TrainingText, tmp_path: Path) -> None:
    student = open_student(kind, target)
    before = expected_tokens([measure(student, target, text)])
    texts = open_texts(student, target, text)
    gradient = nn.value_and_grad(student.network, lambda batch: recursion(student.network, batch, DEPTH))
    optimizer, losses = optimizers.AdamW(learning_rate=1e-3, bias_correction=True), []
    for step in range(15):
        loss, gradients = gradient(texts.take(step))
        optimizer.update(student.network, optimizers.clip_grad_norm(gradients, 1.0)[0])
        mx.eval(student.network.parameters(), optimizer.state)
        losses.append(float(loss.item()))
    assert losses[-1] < losses[0] / 2
    trained = measure(student, target, text)
    assert expected_tokens([trained]) > before + 0.5
    saved = tmp_path / "saved"
    student.save(saved)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700
    again = measure(open_student(kind, target, saved), target, text)
    assert abs(expected_tokens([again]) - expected_tokens([trained])) < 0.1, "half precision"
    proposed = run_drafts(kind, target, saved, text)
    assert (proposed[:-DEPTH, 0] == text.tokens[text.answer + 1 : -DEPTH]).mean() > 0.8
    base, now = (mx.load(str(each / "model.safetensors")) for each in (folder_of(kind), saved))
    assert {name: (each.shape, each.dtype) for name, each in base.items()} == {
        name: (each.shape, each.dtype) for name, each in now.items()
    }
    assert json.loads((saved / "config.json").read_text()) == json.loads((folder_of(kind) / "config.json").read_text())


def test_parts_of_long_texts(target: MlxModel, text: TrainingText) -> None:
    """Every position is measured once, and every batch has parts of at most so many tokens."""
    student = open_student("mtp", target)
    texts = open_texts(student, target, text, text, max_length=24, batch_tokens=64)
    assert sorted(len(texts.take(step)) for step in range(len(texts)))[-1] == 2
    matrix = measure_heads(student.network, texts, 1, 2)["a"]
    assert matrix.shape == (2 * (len(text.tokens) - text.answer - 1), 1)
    assert len(measure_heads(student.network, texts, 1, 1)["a"]) == len(matrix) / 2, "the first text alone"
    assert 0.3 < matrix.mean() < 1
    first = [texts.take(step) for step in range(len(texts))]
    second = [texts.take(step) for step in range(len(texts), 2 * len(texts))]
    assert sum(map(len, first)) == sum(map(len, second)) == len(texts.windows)


def test_tokens_that_a_head_does_not_know(target: MlxModel) -> None:
    """The loss is finite where the target wants one of them."""
    student = open_student("eagle3", target)
    known = set((np.array(student.network.arrays["d2t"]) + np.arange(2048)).tolist())
    unknown = [token for token in range(4096) if token not in known][:20]
    text = TrainingText(np.array(unknown, np.int32), 0, 1, "a")
    texts = open_texts(student, target, text)
    assert np.isfinite(recursion(student.network, texts.take(0), 2).item())
    vocabulary = student.network.build().vocabulary
    ids = np.array([[unknown[0], *sorted(known)[:2]], [*sorted(known)[5:7], unknown[1]]], np.int32)
    found, shares, is_known = find_known(vocabulary, ids, np.log([[0.5, 0.2, 0.1], [0.5, 0.3, 0.1]]))
    assert found.tolist() == [[2048, 0, 1], [5, 6, 2048]] and is_known.tolist() == [False, True]
    assert np.exp(shares[1]) == pytest.approx([0.5 / 0.9, 0.3 / 0.9, 0])


@pytest.mark.parametrize("kind", ["medusa", "hydra", "dflash"])
def test_other_heads_are_refused(kind: str, target: MlxModel) -> None:
    with pytest.raises(DraftRefused, match="neither an EAGLE-3 head nor a folder"):
        open_student(kind, target)


def test_a_head_of_another_target_is_refused() -> None:
    other = make_model({**DENSE, "vocab_size": 4096})
    spec = read_head(folder_of("mtp"))
    assert spec is not None
    with pytest.raises(Unsupported, match="hidden size"):
        HeadStudent(folder_of("mtp"), spec, read_target(other), 2)
