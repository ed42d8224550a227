"""Training of PARD models: what mask rows see and predict, trained drafts, and terms for pairs of tokens."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.adapt.evaluate import Matrix, expected_tokens, find_rounds
from edgespec.adapt.pard import (
    KEPT,
    LEAST,
    PardBatches,
    check_packing,
    choose_cuts,
    measure_packed,
    pack_batch,
    parallel,
    run_packed,
)
from edgespec.adapt.student import Student
from edgespec.adapt.teacher import Part, Parts, Teacher
from edgespec.adapt.texts import TrainingText
from edgespec.backends.llamacpp.model import load as load_llamacpp
from edgespec.backends.mlx.model import load as load_mlx
from edgespec.backends.options import LoadOptions
from edgespec.core.drafter import BlockSession
from edgespec.core.protocols import Session
from edgespec.drafters.sequential import PardSession
from edgespec.errors import DraftRefused
from edgespec.formats.gguf_validate import read_file
from edgespec.registry.resolve import find_pard_token
from tests.adapt.runs import new_folder
from tests.drafters.sessions import decode_greedily
from tests.mlx_models import CONFIGS, make_model
from tests.models import DRAFT, REPOSITORY, TARGET

FIXTURE = REPOSITORY / "tests" / "fixtures" / "pard"
MASK, V = 3, 4096
OPTIONS = LoadOptions(context_size=256, threads=1)


def make_batch(lengths: list[int], first: int) -> Part:
    """Windows of random tokens and rows, filled up to the longest."""
    shape, rng = (len(lengths), max(lengths)), np.random.default_rng(1)
    mask = np.array([[first <= i < n for i in range(shape[1])] for n in lengths], np.float32)
    ids = rng.integers(0, V, (*shape, 3)).astype(np.int32)
    return Part(rng.integers(4, V, shape).astype(np.int32), ids, np.full((*shape, 3), -2, np.float32), mask)


@given(st.integers(0, 30), st.integers(1, 60), st.integers(1, 9), st.integers(0, 99))
@settings(deadline=None)
def test_cuts(first: int, more: int, depth: int, seed: int) -> None:
    """Rows lie inside the window, those of a cut have all smaller depths, and the deeper the fewer."""
    size = first + more
    if depth == 1:
        return
    cuts, depths = choose_cuts(first, size, depth, np.random.default_rng(seed))
    pairs = set(zip(cuts.tolist(), depths.tolist(), strict=True))
    assert len(pairs) == len(cuts)
    assert all(first <= cut and cut + d < size and 1 <= d < depth for cut, d in pairs)
    assert all(d == 1 or (cut, d - 1) in pairs for cut, d in pairs)
    for d in range(1, depth):
        assert (depths == d).sum() <= max(1, round(more * max(KEPT**d, LEAST)))


def test_rows_are_compared_with_the_target_at_their_positions() -> None:
    batch, cuts, depths = make_batch([12, 9], first=4), np.array([4, 7, 4, 2]), np.array([1, 3, 2, 3])
    packed = pack_batch(batch, cuts, depths, MASK, decay=0.5)
    assert packed.tokens[:, 12:].tolist() == [[MASK] * 4] * 2
    assert packed.positions[12:].tolist() == [5, 10, 6, 5]
    assert np.array_equal(packed.ids[:, 12:], batch.ids[:, [5, 10, 6, 5]])
    assert packed.weights[:, :12].tolist() == batch.mask.tolist()
    assert packed.weights[:, 12:].tolist() == [[0.5, 0.125, 0.25, 0], [0.5, 0, 0.25, 0]], (
        "padding, and cuts in the lead"
    )


def test_the_loss_counts_rows_by_their_weights() -> None:
    """Against the loss of each row by itself."""
    network, batch = Student.open(FIXTURE).network, make_batch([10], first=3)
    packed = pack_batch(batch, np.array([3, 5]), np.array([1, 1]), MASK, decay=0.5)
    total, weights = 0.0, 0.0
    logits = np.array(run_packed(network, packed.tokens, packed.positions, packed.sees))
    log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, weight in enumerate(packed.weights[0]):
        p = np.exp(packed.log_probs[0, row].astype(float))
        q = np.exp(log_q[0, row, packed.ids[0, row]].astype(float))
        total += weight * ((p * np.log(p / q)).sum() + (1 - p.sum()) * np.log((1 - p.sum()) / (1 - q.sum())))
        weights += weight
    assert float(parallel("forward-kl")(network, packed).item()) == pytest.approx(total / weights, rel=1e-4)


@pytest.mark.parametrize("name", ["sliding-window", "recurrent", "hybrid"])
def test_networks_that_cannot_be_packed(name: str) -> None:
    network = make_model({**CONFIGS[name], "vocab_size": 97})
    with pytest.raises(DraftRefused, match="cannot be trained as a PARD model"):
        check_packing(network)


@pytest.fixture(scope="module")
def answer() -> tuple[TrainingText, Teacher]:
    """What the packaged target says after a function's header, and the target."""
    model = load_llamacpp(TARGET, OPTIONS)
    session = model.open_session()
    prompt = model.tokenizer.encode("def read_lines(path):\n", parse_special=False)
    tokens = np.array([*prompt, *decode_greedily(session, prompt, 100, V)], np.int32)
    return TrainingText(tokens, 0, len(prompt), "a", 0.0), Teacher(model.open_session(), lambda: None)


def make_batches(answer: tuple[TrainingText, Teacher], seed: int = 0) -> PardBatches:
    text, teacher = answer
    return PardBatches(Parts([text], teacher, new_folder()), MASK, depth=4, seed=seed)


def test_batches_are_the_same_at_each_step(answer: tuple[TrainingText, Teacher]) -> None:
    one, other = make_batches(answer), make_batches(answer, seed=1)
    first, again, second = one.take(0), make_batches(answer).take(0), one.take(1)
    assert len(one) == 1
    assert np.array_equal(first.positions, again.positions)
    assert not np.array_equal(first.positions, second.positions)
    assert not np.array_equal(first.positions, other.take(0).positions)
    drawn = first.positions[first.weights[0] > 0]
    assert (drawn.min(), drawn.max()) == (0, len(answer[0].tokens) - 2)


def train(student: Student, batches: PardBatches, steps: int) -> None:
    student.train_all()
    network, objective = student.network, parallel("forward-kl")
    gradient = nn.value_and_grad(network, lambda batch: objective(network, batch))
    optimizer = optimizers.AdamW(learning_rate=1e-3, bias_correction=True)
    for step in range(steps):
        _, gradients = gradient(batches.take(step))
        optimizer.update(network, optimizers.clip_grad_norm(gradients, 1.0)[0])
        mx.eval(network.parameters(), optimizer.state)


def measure_blocks(session: BlockSession, texts: list[TrainingText], depth: int) -> dict[str, Matrix]:
    """The Matrix of each conversation, by a block at each position."""
    found = {}
    for text in texts:
        tokens, rounds, hits = text.tokens.tolist(), find_rounds(text), []
        session.begin(tokens[: rounds.start])
        for position in rounds:
            rows = session.block(tokens[:position], position, min(depth, len(tokens) - position)) or ()
            right = [int(row.argmax()) == tokens[position + d] for d, row in enumerate(rows)]
            hits.append([*right, *[False] * (depth - len(right))])
        found[text.source] = np.array(hits, np.float32)
    return found


def measure(session: Session, text: TrainingText) -> float:
    pard = PardSession(session, V, MASK)
    found = measure_blocks(pard, [text], 4)
    assert found.keys() == {"a"} and found["a"].shape == (len(text.tokens) - text.answer - 1, 4)
    return expected_tokens([found["a"]])


def test_a_draft_that_is_trained_proposes_blocks(answer: tuple[TrainingText, Teacher], tmp_path: Path) -> None:
    text, _ = answer
    before = measure(load_llamacpp(DRAFT, OPTIONS).open_session(), text)
    student = Student.open(DRAFT)
    train(student, make_batches(answer), 15)
    student.save(tmp_path / "pard.gguf", mask_token=MASK)
    after = measure(load_llamacpp(tmp_path / "pard.gguf", OPTIONS).open_session(), text)
    assert find_pard_token(read_file(DRAFT)) is None
    assert find_pard_token(read_file(tmp_path / "pard.gguf")) == MASK
    assert before < 2 and after > before + 0.5


def test_a_file_that_names_a_mask_token_already(tmp_path: Path) -> None:
    Student.open(FIXTURE / "model.gguf").save(tmp_path / "other.gguf", mask_token=9)
    assert find_pard_token(read_file(tmp_path / "other.gguf")) == 9


def test_proposals_are_those_of_packed_rows(answer: tuple[TrainingText, Teacher]) -> None:
    """Blocks of a session at each position, against one forward with all of them."""
    texts = [answer[0], TrainingText(answer[0].tokens[:40], 30, 8, "b", 0.0)]
    session = PardSession(load_mlx(FIXTURE, OPTIONS).open_session(), V, MASK)
    proposed = measure_blocks(session, texts, 3)
    packed = measure_packed(Student.open(FIXTURE).network, texts, MASK, 3, lambda: None)
    assert proposed["b"].shape == (10, 3) and proposed["a"].shape == (99, 3)
    assert {name: each.tolist() for name, each in packed.items()} == {n: each.tolist() for n, each in proposed.items()}
    assert 0.2 < proposed["a"][:, 1].mean() < 1 and proposed["a"][-1, 1:].tolist() == [0, 0]
