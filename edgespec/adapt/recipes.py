"""How each kind of draft is opened, trained, measured and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from edgespec.adapt.batches import Batches, TextBatches
from edgespec.adapt.evaluate import Matrix, measure_chains
from edgespec.adapt.options import TrainOptions
from edgespec.adapt.student import Student
from edgespec.adapt.teacher import RowStore, Teacher
from edgespec.adapt.texts import TrainingText
from edgespec.backends import Model
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import DraftRefused
from edgespec.planner.plan import PlannedDrafter

Weights = Literal["full", "lora"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
DEPTH = 4  # tokens of the drafts whose gain is measured
RANK = 16  # of LoRA
BATCH_TOKENS = 1024
TRAINED = ("model", "pard", "mtp", "eagle", "eagle3")
"""The drafters that can be trained, as `auto` chooses among those of a target."""
_HEADS = TRAINED[2:]


@dataclass(frozen=True, slots=True)
class Materials:
    """What a draft is trained and measured with.

    check    polled between forwards; waits while engines work
    reading  gets the numbers of tokens that the target has read, and of all
    """

    target: Model
    train: Sequence[TrainingText]
    held_out: Sequence[TrainingText]
    options: TrainOptions
    check: CheckCancelled
    reading: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Trainee:
    """A draft in training.

    measure  the matrices of the held-out conversations, for drafts of DEPTH tokens
    save     writes the draft to a path, which it creates
    """

    network: Any
    objective: Callable[[Any, Any], Any]
    batches: Batches[Any]
    held_out: Batches[Any]
    measure: Callable[[], Mapping[str, Matrix]]
    save: Callable[[Path], None]


def open_trainee(
    drafter: PlannedDrafter, path: Path, weights: Weights, materials: Materials, opened: ExitStack
) -> Trainee:
    """The draft at `path`, of the kind of `drafter`; what is opened for it is closed with `opened`.

    Raises EdgespecError, Cancelled.
    """
    if drafter.head is not None:
        return _open_head(drafter, path, materials, opened)
    student = Student.open(path)
    session = materials.target.open_session(materials.check)
    opened.callback(session.close)
    if weights == "lora":
        student.train_lora(RANK)
    else:
        student.train_all()
    if drafter.spec.name == "pard":
        return _make_pard(student, drafter, session, materials)
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
    from edgespec.adapt.losses import distillation

    network = student.network
    batches, held_out = _read_texts(session, materials)
    return Trainee(
        network=network,
        objective=distillation(materials.options.loss),
        batches=batches,
        held_out=held_out,
        measure=lambda: measure_chains(network, materials.held_out, DEPTH, materials.check),
        save=student.save,
    )


def _make_pard(student: Student, drafter: PlannedDrafter, session: Session, materials: Materials) -> Trainee:
    """A draft that predicts several tokens in one forward."""
    from edgespec.adapt.pard import PardBatches, check_packing, measure_packed, parallel

    network, mask_token = student.network, _mask_token(drafter)
    check_packing(network)
    batches, held_out = _read_texts(session, materials)
    seed = materials.options.seed
    return Trainee(
        network=network,
        objective=parallel(materials.options.loss),
        batches=PardBatches(batches, mask_token, seed=seed),
        held_out=PardBatches(held_out, mask_token, seed=seed),
        measure=lambda: measure_packed(network, materials.held_out, mask_token, DEPTH, materials.check),
        save=lambda path: student.save(path, mask_token),
    )


def _open_head(drafter: PlannedDrafter, path: Path, materials: Materials, opened: ExitStack) -> Trainee:
    """A trained head of a target on MLX."""
    from edgespec.backends.mlx.model import MlxModel

    spec, target = drafter.head, materials.target
    if not isinstance(target, MlxModel) or spec is None or drafter.is_in_target or not path.is_dir():
        raise DraftRefused(
            "only heads in a folder of their own, of a target on MLX, can be trained.",
            hint="Name the head's folder with --draft, and use --backend mlx.",
        )
    from edgespec.adapt.head_student import HeadStudent
    from edgespec.adapt.head_texts import HeadTexts
    from edgespec.adapt.heads import measure_heads, recursion

    student = HeadStudent(path, spec, target.network, target.layer_count)
    parts = []
    for texts in (materials.train, materials.held_out):
        session = target.open_session(materials.check)
        opened.callback(session.close)
        seed = materials.options.seed
        parts.append(HeadTexts(texts, session, student.layers, materials.check, batch_tokens=BATCH_TOKENS, seed=seed))
    batches, held_out = parts
    return Trainee(
        network=student.network,
        objective=recursion(materials.options.loss),
        batches=batches,
        held_out=held_out,
        measure=lambda: measure_heads(student.network, held_out, DEPTH, materials.check),
        save=student.save,
    )


def _read_texts(session: Session, materials: Materials) -> tuple[TextBatches, TextBatches]:
    """(batches of the texts to train on, of the held-out ones)"""
    teacher = Teacher(session, materials.check)
    batches = []
    for texts in (materials.train, materials.held_out):
        rows = RowStore(teacher, [text.tokens for text in texts])
        rows.fill(materials.reading)
        batches.append(TextBatches(texts, rows, batch_tokens=BATCH_TOKENS, seed=materials.options.seed))
    return batches[0], batches[1]


def _mask_token(drafter: PlannedDrafter) -> int:
    assert drafter.mask_token is not None  # of every PARD model that is planned
    return drafter.mask_token
