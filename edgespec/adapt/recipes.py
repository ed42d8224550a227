"""How each kind of draft is opened, trained, measured and saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.adapt.evaluate import Matrix, measure_chains
from edgespec.adapt.options import Pace, Progress, TrainOptions, TrainResult, Weights
from edgespec.adapt.student import Student
from edgespec.adapt.teacher import Batches, RowStore, Teacher, TextBatches
from edgespec.adapt.texts import TrainingText
from edgespec.backends import BackendName, Model, open_model
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import DraftRefused
from edgespec.planner.draft_finder import PlannedDrafter

DEPTH = 4  # tokens of the drafts whose gain is measured
RANK = 16  # of LoRA
BATCH_TOKENS = 1024
TRAINED = ("model", "pard", "mtp", "eagle", "eagle3")
"""The drafters that can be trained, as `auto` chooses among those of a target."""
_BIGRAM_ROWS = 50_000  # of blocks; more gained little


@dataclass(frozen=True, slots=True)
class Materials:
    """What a draft is trained and measured with.

    load      options of the target, with which drafts are opened too that a runtime runs
    folder    of the checkpoints
    check     polled between forwards; waits while engines work
    reading   gets the numbers of tokens that the target has read, and of all
    """

    target: Model
    load: LoadOptions
    train: Sequence[TrainingText]
    held_out: Sequence[TrainingText]
    options: TrainOptions
    pace: Pace
    folder: Path
    check: CheckCancelled
    reading: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Trainee:
    """A draft in training.

    train    trains it, from the last checkpoint on, and reports each step
    measure  the matrices of the held-out conversations, for drafts of DEPTH tokens
    save     writes the draft to a path, which it creates
    """

    train: Callable[[Callable[[Progress], None]], TrainResult]
    measure: Callable[[], Mapping[str, Matrix]]
    save: Callable[[Path], None]


def open_trainee(
    drafter: PlannedDrafter, path: Path, weights: Weights, materials: Materials, opened: ExitStack
) -> Trainee:
    """The draft at `path`, of the kind of `drafter`; what is opened for it is closed with `opened`.

    Raises EdgespecError, Cancelled.
    """
    if weights == "bigram":
        return _open_bigram(drafter, path, materials, opened)
    if drafter.head is not None:
        if weights == "lora":
            raise DraftRefused("heads are small, and are trained whole.", hint="Use --method full.")
        return _open_head(drafter, path, materials, opened)
    student = Student.open(path)
    session = materials.target.open_session(materials.check)
    opened.callback(session.close)
    if weights == "lora":
        student.train_lora(RANK)
    else:
        student.train_all()
    if drafter.spec.name == "pard":
        return _make_pard(student, path, drafter, session, materials)
    return _make_model(student, session, materials)


def measure_draft(
    drafter: PlannedDrafter, path: Path, texts: Sequence[TrainingText], check: CheckCancelled
) -> dict[str, Matrix]:
    """The matrices of the draft model at `path`. Raises DraftRefused for a head, which needs its target."""
    if drafter.head is not None:
        raise DraftRefused(
            "heads are not trained on the newest texts alone.", hint="Use `edgespec adapt` without --newest."
        )
    network = Student.open(path).network
    if drafter.spec.name != "pard":
        return measure_chains(network, texts, DEPTH, check)
    from edgespec.adapt.pard import measure_packed

    return measure_packed(network, texts, _mask_token(drafter), DEPTH, check)


def _make_model(student: Student, session: Session, materials: Materials) -> Trainee:
    """A sequential draft."""
    from edgespec.adapt.trainer import distillation

    network = student.network
    parts = _read_texts(session, student.vocab_size, materials)
    return Trainee(
        train=_descend(network, distillation(materials.options.loss), parts, materials),
        measure=lambda: measure_chains(network, materials.held_out, DEPTH, materials.check),
        save=student.save,
    )


def _make_pard(
    student: Student, path: Path, drafter: PlannedDrafter, session: Session, materials: Materials
) -> Trainee:
    """A draft that predicts several tokens in one forward. What it has learned of pairs of tokens stays."""
    from edgespec.adapt.pard import PardBatches, check_packing, measure_packed, parallel

    network, mask_token, seed = student.network, _mask_token(drafter), materials.options.seed
    check_packing(network)
    texts = _read_texts(session, student.vocab_size, materials)
    parts = [PardBatches(each, mask_token, seed=seed) for each in texts]

    def save(to: Path) -> None:
        student.save(to, mask_token)
        _copy_bigram(path, to)

    return Trainee(
        train=_descend(network, parallel(materials.options.loss), parts, materials),
        measure=lambda: measure_packed(network, materials.held_out, mask_token, DEPTH, materials.check),
        save=save,
    )


def _open_bigram(drafter: PlannedDrafter, path: Path, materials: Materials, opened: ExitStack) -> Trainee:
    """The term for pairs of tokens of a PARD model, which itself stays as it is."""
    if drafter.spec.name != "pard":
        raise DraftRefused(
            "only PARD models have a term for pairs of tokens.", hint="Use --method full, or name a PARD model."
        )
    from edgespec.adapt.evaluate import measure_blocks
    from edgespec.adapt.markov import read_rows, train_bigram
    from edgespec.drafters.recycling import FILE, find_bigram
    from edgespec.drafters.sequential import PardSession

    backend: BackendName = "mlx" if path.is_dir() else "llamacpp"
    check, vocab_size = materials.check, materials.target.tokenizer.vocab_size
    model = open_model(backend, path, materials.load, progress=lambda fraction: None, check=check)
    opened.callback(model.close)
    blocks = PardSession(model.open_session(check), vocab_size, _mask_token(drafter))
    opened.callback(blocks.close)
    learned = [find_bigram(path)]

    def train(report: Callable[[Progress], None]) -> TrainResult:
        began_s = perf_counter()
        rows = read_rows(blocks, materials.train, DEPTH, check, _BIGRAM_ROWS)
        learned[0] = train_bigram(rows, vocab_size, check, seed=materials.options.seed)
        return TrainResult(1, 1, None, nan, None, perf_counter() - began_s)

    def save(to: Path) -> None:
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, to)
        assert learned[0] is not None  # after the training
        learned[0].save(to.parent / FILE)

    return Trainee(
        train=train,
        measure=lambda: measure_blocks(blocks, materials.held_out, DEPTH, check, learned[0]),
        save=save,
    )


def _copy_bigram(start: Path, to: Path) -> None:
    from edgespec.drafters.recycling import FILE

    if (start.parent / FILE).is_file():
        shutil.copyfile(start.parent / FILE, to.parent / FILE)


def _open_head(drafter: PlannedDrafter, path: Path, materials: Materials, opened: ExitStack) -> Trainee:
    """A trained head of a target on MLX."""
    from edgespec.backends.mlx.model import MlxModel

    spec, target = drafter.head, materials.target
    if not isinstance(target, MlxModel) or spec is None or drafter.is_in_target or not path.is_dir():
        raise DraftRefused(
            "only heads in a folder of their own, of a target on MLX, can be trained.",
            hint="Name the head's folder with --draft, and use --backend mlx.",
        )
    from edgespec.adapt.heads import HeadStudent, HeadTexts, measure_heads, recursion

    student = HeadStudent(path, spec, target.network, target.layer_count)
    parts = []
    for texts in (materials.train, materials.held_out):
        session = target.open_session(materials.check)
        opened.callback(session.close)
        seed = materials.options.seed
        parts.append(HeadTexts(texts, session, student.layers, materials.check, batch_tokens=BATCH_TOKENS, seed=seed))
    return Trainee(
        train=_descend(student.network, recursion(materials.options.loss), parts, materials),
        measure=lambda: measure_heads(student.network, parts[1], DEPTH, materials.check),
        save=student.save,
    )


def _read_texts(session: Session, vocab_size: int, materials: Materials) -> tuple[TextBatches, TextBatches]:
    """The batches of the texts to train on, and of those that are held out; `vocab_size` is the draft's."""
    teacher, batches = Teacher(session, materials.check, vocab_size), []
    for texts in (materials.train, materials.held_out):
        rows = RowStore(teacher, [text.tokens for text in texts])
        rows.fill(materials.reading)
        batches.append(TextBatches(texts, rows, batch_tokens=BATCH_TOKENS, seed=materials.options.seed))
    return batches[0], batches[1]


def _descend(
    network: Any,
    objective: Callable[[Any, Any], Any],
    parts: Sequence[Batches[Any]],
    materials: Materials,
) -> Callable[[Callable[[Progress], None]], TrainResult]:
    """What trains by gradients, on the first of two parts; the other one is held out."""
    from edgespec.adapt.trainer import Trainer

    batches, held_out = parts
    trainer = Trainer(
        network, objective, batches, materials.options, materials.folder, pace=materials.pace, held_out=held_out
    )
    return lambda report: trainer.run(report, materials.check)


def _mask_token(drafter: PlannedDrafter) -> int:
    assert drafter.mask_token is not None  # of every PARD model that is planned
    return drafter.mask_token
