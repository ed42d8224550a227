"""Heads that are trained from nothing: their files on both runtimes, what they are compared with, and refusals."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.backends import Model, open_model
from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.heads import open_head
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.options import LoadOptions
from edgespec.core.decoding import read_prompt
from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import Budget
from edgespec.drafters.ngram import NgramDrafter
from edgespec.errors import DoesNotFit, DraftRefused, InvalidRequest
from edgespec.formats.head_file import read_head
from edgespec.train.head_arrays import read_parts
from edgespec.train.head_files import check_target, choose_vocabulary, write_new_head
from edgespec.train.head_student import HeadStudent, measure_heads
from edgespec.train.new_head import _describe_writing, _keep_time, measure_lookups, prepare_first, split_conversations
from edgespec.train.options import CHECKPOINT, Allowance, Progress
from edgespec.train.parts import Parts
from edgespec.train.teacher import Teacher
from edgespec.train.texts import TrainingText
from edgespec.train.trainee import Trainee
from tests.drafters.sessions import decode_greedily
from tests.gguf_models import TARGET, llama3, mamba, qwen
from tests.mlx_models import CONFIGS, DENSE, make_folder
from tests.train.runs import new_folder
from tests.trained_heads import EAGLE3, convert

DEPTH = 3
OPTIONS = LoadOptions(context_size=256, threads=1)


def make_target(name: str, folder: Path) -> Path:
    """A target of one of the kinds that can have heads."""
    if name == "packaged":
        return TARGET
    path = folder / name
    if name == "llama3.gguf":
        llama3(path)
    elif name.endswith(".gguf"):
        qwen(path, name.removesuffix(".gguf"))
    else:
        config = {**DENSE, "rope_theta": 1e4, "model_type": name.partition("-")[0]}
        make_folder(path, config, bits=4 if name.endswith("4-bit") else None)
    return path


TARGETS = ("packaged", "llama3.gguf", "qwen3.gguf", "llama", "llama-4-bit", "qwen2", "qwen3")


def open_target(path: Path) -> Model:
    return open_model("mlx" if path.is_dir() else "llamacpp", path, OPTIONS)


def make_text(target: Model, n: int = 60) -> TrainingText:
    """What the target says."""
    prompt = [0, 5, 9, 3, 17]
    session: Any = target.open_session()
    answer = decode_greedily(session, prompt, n, target.tokenizer.vocab_size)
    session.close()
    return TrainingText(np.array([*prompt, *answer], np.int32), 0, len(prompt), "a")


def measure(target: Model, path: Path, head: Path, text: TrainingText) -> tuple[np.ndarray, HeadStudent]:
    spec = read_head(head)
    assert spec is not None
    student = HeadStudent(head, spec, read_parts(target, path), target.layer_count, is_new=True)
    session = target.open_session()
    parts = Parts([text], Teacher(session, layers=student.layers), new_folder())
    found = measure_heads(student.network, parts, DEPTH, 1)["a"]
    session.close()
    return found, student


def run_drafts(target: Model, head: Path, text: TrainingText) -> np.ndarray:
    """[positions, DEPTH] the tokens that the head proposes in use."""
    spec = read_head(head)
    assert spec is not None
    session: Any = target.open_session()
    if isinstance(target, LlamaModel):
        opened = open_head(target, head, spec.complete(target.layer_count))
    else:
        assert isinstance(target, MlxModel)
        opened = target.load_head(spec.complete(target.layer_count), head)
    draft: Any = opened.open_session(session)
    tokens = text.tokens.tolist()
    draft.begin(tokens[: text.answer])
    proposed = []
    for position in range(text.answer + 1, len(tokens)):
        read_prompt(session, tokens[:position])
        drafted = [int(draft.read(tokens[:position], position).argmax())]
        while len(drafted) < DEPTH:
            drafted.append(int(draft.step(drafted[-1]).argmax()))
        proposed.append(drafted)
    draft.close()
    opened.close()
    return np.array(proposed)


def check_drafts(matrix: np.ndarray, proposed: np.ndarray, text: TrainingText) -> None:
    """The accepted part of each draft in use is what the passes say, up to near-ties of other roundings."""
    true = np.concatenate([text.tokens, np.full(DEPTH, -1)])
    true = np.stack([true[text.answer + 1 + i : text.answer + 1 + i + DEPTH] for i in range(len(proposed))])
    accepted = np.cumprod(proposed == true, axis=1)
    same = (np.cumprod(matrix, axis=1) == accepted).all(axis=1)
    assert len(matrix) == len(proposed) and same.mean() > 0.95


@pytest.fixture(scope="module")
def packaged() -> Iterator[Model]:
    with closing(open_target(TARGET)) as target:
        yield target


def test_a_trained_head_on_llamacpp(packaged: Model, tmp_path: Path) -> None:
    """The GGUF file of the EAGLE-3 head of the tests, whose drafts are often right, read, changed, saved and run."""
    head = convert(Path(shutil.copytree(EAGLE3, tmp_path / "head")))
    prompt = packaged.tokenizer.encode("def read_lines(path):\n", parse_special=False)
    session: Any = packaged.open_session()
    answer = decode_greedily(session, prompt, 60, packaged.tokenizer.vocab_size)
    session.close()
    text = TrainingText(np.array([*prompt, *answer], np.int32), 0, len(prompt), "a")
    matrix, student = measure(packaged, TARGET, head, text)
    proposed = run_drafts(packaged, head, text)
    check_drafts(matrix, proposed, text)
    assert 0.3 < matrix[:, 0].mean() < 1
    student.network.tensors = [each * 1.5 if each.ndim == 2 else each for each in student.network.tensors]
    saved = tmp_path / "saved.gguf"
    student.save(saved)
    assert saved.stat().st_mode & 0o077 == 0
    changed, _ = measure(packaged, TARGET, saved, text)
    check_drafts(changed, run_drafts(packaged, saved, text), text)


@pytest.mark.parametrize("name", TARGETS)
def test_a_new_head_is_run_by_the_runtime_of_its_target(name: str, tmp_path: Path) -> None:
    path = make_target(name, tmp_path)
    with closing(open_target(path)) as target:
        text = make_text(target)
        vocabulary = choose_vocabulary([text.tokens], target.tokenizer.vocab_size)
        head = tmp_path / ("head" if path.is_dir() else "head.gguf")
        write_new_head(target, path, vocabulary, head)
        matrix, student = measure(target, path, head, text)
        proposed = run_drafts(target, head, text)
        check_drafts(matrix, proposed, text)
        assert set(proposed.ravel()) <= set(vocabulary.tolist())
        n_trained = len(student.network.tensors)
        assert n_trained == len(student.network.arrays) - 1, "all but the table of tokens is trained"


@pytest.mark.parametrize("kind", ["mamba", "sliding-window", "qwen2.gguf"])
def test_other_targets_can_have_no_new_head(kind: str, tmp_path: Path) -> None:
    """That is known before a text is written; llama.cpp does not give the hidden states of a qwen2."""
    path = tmp_path / kind
    if kind == "mamba":
        mamba(path)
    elif kind == "sliding-window":
        make_folder(path, CONFIGS[kind])
    else:
        make_target(kind, tmp_path)
    with closing(open_target(path)) as target, pytest.raises((DraftRefused, Unsupported)) as refused:
        check_target(target, path, 2**40)
    assert "no head is trained" in refused.value.message or "does not give the hidden states" in refused.value.message


def test_a_training_that_does_not_fit(packaged: Model) -> None:
    check_target(packaged, TARGET, 2**30)
    with pytest.raises(DoesNotFit, match="training a head needs"):
        check_target(packaged, TARGET, 10**7)


def test_a_first_head_is_written_once_and_anew_where_it_is_damaged(packaged: Model, tmp_path: Path) -> None:
    text = make_text(packaged, 30)
    materials: Any = SimpleNamespace(target=packaged, target_path=TARGET, train=[text], folder=tmp_path)
    head, checkpoint = tmp_path / "first.gguf", tmp_path / CHECKPOINT
    prepare_first(materials, head)
    checkpoint.write_bytes(b"of this head")
    written = head.read_bytes()
    prepare_first(materials, head)
    assert head.read_bytes() == written and checkpoint.exists()
    head.write_bytes(written[:100])
    prepare_first(materials, head)
    assert read_head(head).hidden_size == 256 and not checkpoint.exists()


def test_frequent_tokens_are_scored() -> None:
    found = choose_vocabulary([np.array([5, 5, 7]), np.array([7, 9000, 9000])], 10_000)
    assert len(found) == 8192 and (np.diff(found) > 0).all() and {5, 7, 9000, 0, 8190} <= set(found.tolist())
    assert 8191 not in found


def make_texts(n: int, length: int = 300) -> list[TrainingText]:
    rng = np.random.default_rng(0)
    return [TrainingText(rng.integers(0, 9, length).astype(np.int32), 20, 20, f"own:{i}") for i in range(n)]


def test_a_fifth_is_held_out() -> None:
    """By number, so that it stays held out when texts are added; and no question is on both sides."""
    texts = make_texts(48)
    train, held_out = split_conversations(texts)
    assert [text.source for text in held_out] == [f"own:{i}" for i in range(0, 48, 5)] and len(train) == 38
    assert len(split_conversations(make_texts(900))[1]) == 60
    again = replace(texts[1], source="own:50")
    train, held_out = split_conversations([*texts, again])
    assert "own:50" in [text.source for text in held_out] and "own:1" not in [text.source for text in train]
    for few in (make_texts(36), make_texts(48, 60)):
        with pytest.raises(InvalidRequest, match="10,000 and 40 are needed"):
            split_conversations(few)


def test_lookups_are_the_drafters() -> None:
    (text,) = make_texts(1, 80)
    drafter, tokens = NgramDrafter(), text.tokens.tolist()
    (matrix,) = measure_lookups([text], DEPTH).values()
    drafter.begin(tokens[: text.answer + 1], None)
    for row, position in zip(matrix, range(text.answer + 1, len(tokens)), strict=True):
        tree = DraftTree()
        for _ in drafter.expand(tree, tokens[:position], Budget(DEPTH, DEPTH)):
            pass
        drafted = tree.path_tokens(len(tree) - 1) if len(tree) else []
        hits = [a == b for a, b in zip(drafted, tokens[position:], strict=False)]
        assert row.tolist() == [*hits, *[0] * (DEPTH - len(hits))]
    assert 0 < matrix.mean() < 1


@pytest.mark.parametrize(("seconds", "n", "taken_s"), [(math.inf, 40, 60.0), (30.0, 20, 30.0), (1.0, 8, 12.0)])
def test_as_many_held_out_texts_are_measured_as_time_allows(seconds: float, n: int, taken_s: float) -> None:
    """So that a first head, which nothing was measured with, leaves time for what follows its training."""
    now, measured = [100.0], []

    def measure(n: int) -> dict[str, Any]:
        measured.append(n)
        now[0] += 1.5 * n
        return {}

    trainee = Trainee([], lambda report: Progress(0, 0, 0.0, 0.0), measure, 40, lambda path: None)
    fitting, found_s = trainee.fit(seconds, lambda: now[0])
    fitting.measure()
    assert (fitting.n_held_out, found_s, measured) == (n, taken_s, [1, 2, n])


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(400.0, "The time is too short: "), (250.0, "Most of the time is needed for writing: "), (200.0, "")],
)
def test_a_slow_writer_is_told(seconds: float, told: str) -> None:
    said = _describe_writing(9_000, seconds, 360.0)
    assert said.startswith(told) and bool(said) == bool(told)
    assert not said or "the 9,000 tokens that are still needed take about" in said


@pytest.mark.parametrize(
    ("left_s", "limit_s", "n_measured", "hint"),
    [
        (100.0, 600.0, 1, None),
        (50.0, 60.0, 1, "with --minutes 3 or more"),
        (50.0, 600.0, 1, "The same command goes on."),
        (100.0, 600.0, 2, "The same command goes on."),
        (130.0, 600.0, 2, None),
    ],
)
def test_time_is_kept_for_measuring(left_s: float, limit_s: float, n_measured: int, hint: str | None) -> None:
    """Eight texts of 7.5 seconds each, once after the training, and before it too if a head is in use."""
    now = [0.0]

    def measure(n: int) -> dict[str, Any]:
        now[0] += 7.5 * n
        return {}

    allowance = Allowance(limit_s)
    allowance.clock = lambda: now[0]  # type: ignore[method-assign]
    allowance._end_s = left_s + 3 * 7.5  # three are measured to tell what they take
    trainee = Trainee([], lambda report: Progress(0, 0, 0.0, 0.0), measure, 8, lambda path: None)
    if hint is None:
        assert _keep_time(trainee, allowance, n_measured).n_held_out == 8 and allowance.reserve_s == 60.0
        return
    with pytest.raises(InvalidRequest) as refused:
        _keep_time(trainee, allowance, n_measured)
    assert hint in refused.value.hint
