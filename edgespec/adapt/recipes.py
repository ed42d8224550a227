"""How each kind of draft is opened, trained, measured and saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from edgespec.adapt.evaluate import Matrix, measure_blocks, measure_chains
from edgespec.adapt.markov import read_rows, train_bigram
from edgespec.adapt.options import Progress, Throttle, TrainOptions, Weights
from edgespec.adapt.teacher import Batches, RowStore, Teacher, TextBatches
from edgespec.adapt.texts import TrainingText
from edgespec.backends import BackendName, Model, open_model
from edgespec.backends.mlx.library import load_mlx
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import CheckCancelled
from edgespec.drafters.recycling import FILE as BIGRAM_FILE
from edgespec.drafters.recycling import find_bigram
from edgespec.drafters.sequential import PardSession
from edgespec.errors import BackendUnavailable, DraftRefused
from edgespec.planner.draft_finder import PlannedDrafter

if TYPE_CHECKING:
    from edgespec.adapt.student import Student

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
    throttle: Throttle
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

    train: Callable[[Callable[[Progress], None]], Progress]
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
    student = open_student(path)
    session = materials.target.open_session(materials.check)
    opened.callback(session.close)
    if weights == "lora":
        student.train_lora(RANK)
    else:
        student.train_all()
    if drafter.spec.name == "pard":
        from edgespec.adapt.pard import check_packing

        check_packing(student.network)
    rows = RowStore(Teacher(session, materials.check, student.vocab_size), [text.tokens for text in materials.train])
    rows.fill(materials.reading)
    batches = TextBatches(materials.train, rows, batch_tokens=BATCH_TOKENS, seed=materials.options.seed)
    if drafter.spec.name == "pard":
        return _make_pard(student, path, drafter, batches, materials)
    from edgespec.adapt.trainer import distillation

    return Trainee(
        train=_descend(student.network, distillation(materials.options.loss), batches, materials),
        measure=lambda: measure_chains(student.network, materials.held_out, DEPTH, materials.check),
        save=student.save,
    )


def open_student(path: Path) -> Student:
    """The draft model at `path` as a trainable network. Raises BackendUnavailable without MLX; see Student.open."""
    try:
        load_mlx()
    except BackendUnavailable as error:
        raise BackendUnavailable(
            f"a draft is trained by MLX, and {error.message}", hint="Install it: pip install 'edgespec[adapt]'."
        ) from error
    from edgespec.adapt.student import Student

    return Student.open(path)


def measure_draft(
    drafter: PlannedDrafter, path: Path, texts: Sequence[TrainingText], check: CheckCancelled
) -> dict[str, Matrix]:
    """The matrices of the draft model at `path`. Raises DraftRefused for a head, which needs its target."""
    if drafter.head is not None:
        raise DraftRefused(
            "heads are not trained on the newest texts alone.", hint="Use `edgespec adapt` without --newest."
        )
    network = open_student(path).network
    if drafter.spec.name != "pard":
        return measure_chains(network, texts, DEPTH, check)
    from edgespec.adapt.pard import measure_packed

    return measure_packed(network, texts, _mask_token(drafter), DEPTH, check)


def _make_pard(
    student: Student, path: Path, drafter: PlannedDrafter, texts: TextBatches, materials: Materials
) -> Trainee:
    """A draft that predicts several tokens in one forward. What it has learned of pairs of tokens stays."""
    from edgespec.adapt.pard import PardBatches, measure_packed, parallel

    network, mask_token = student.network, _mask_token(drafter)

    def save(to: Path) -> None:
        student.save(to, mask_token)
        if (path.parent / BIGRAM_FILE).is_file():
            shutil.copyfile(path.parent / BIGRAM_FILE, to.parent / BIGRAM_FILE)

    batches = PardBatches(texts, mask_token, seed=materials.options.seed)
    return Trainee(
        train=_descend(network, parallel(materials.options.loss), batches, materials),
        measure=lambda: measure_packed(network, materials.held_out, mask_token, DEPTH, materials.check),
        save=save,
    )


def _open_bigram(drafter: PlannedDrafter, path: Path, materials: Materials, opened: ExitStack) -> Trainee:
    """The term for pairs of tokens of a PARD model, which itself stays as it is."""
    if drafter.spec.name != "pard":
        raise DraftRefused(
            "only PARD models have a term for pairs of tokens.", hint="Use --method full, or name a PARD model."
        )
    backend: BackendName = "mlx" if path.is_dir() else "llamacpp"
    check, vocab_size = materials.check, materials.target.tokenizer.vocab_size
    model = open_model(backend, path, materials.load, progress=lambda fraction: None, check=check)
    opened.callback(model.close)
    blocks = PardSession(model.open_session(check), vocab_size, _mask_token(drafter))
    opened.callback(blocks.close)
    learned = [find_bigram(path)]

    def train(report: Callable[[Progress], None]) -> Progress:
        began_s = perf_counter()
        rows = read_rows(blocks, materials.train, DEPTH, check, _BIGRAM_ROWS)
        learned[0] = train_bigram(rows, vocab_size, check, seed=materials.options.seed)
        return Progress(1, 1, nan, perf_counter() - began_s)

    def save(to: Path) -> None:
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, to)
        assert learned[0] is not None  # after the training
        learned[0].save(to.parent / BIGRAM_FILE)

    return Trainee(
        train=train,
        measure=lambda: measure_blocks(blocks, materials.held_out, DEPTH, check, learned[0]),
        save=save,
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
    from edgespec.adapt.heads import HeadStudent, HeadTexts, measure_heads, recursion

    student = HeadStudent(path, spec, target.network, target.layer_count)

    def read(texts: Sequence[TrainingText]) -> HeadTexts:
        session = target.open_session(materials.check)
        opened.callback(session.close)
        seed = materials.options.seed
        return HeadTexts(texts, session, student.layers, materials.check, batch_tokens=BATCH_TOKENS, seed=seed)

    held_out = read(materials.held_out)
    return Trainee(
        train=_descend(student.network, recursion(materials.options.loss), read(materials.train), materials),
        measure=lambda: measure_heads(student.network, held_out, DEPTH, materials.check),
        save=student.save,
    )


def _descend(
    network: Any, objective: Callable[[Any, Any], Any], batches: Batches[Any], materials: Materials
) -> Callable[[Callable[[Progress], None]], Progress]:
    """What trains by gradients."""
    from edgespec.adapt.trainer import Trainer

    trainer = Trainer(network, objective, batches, materials.options, materials.folder, materials.throttle)
    return lambda report: trainer.run(report, materials.check)


def _mask_token(drafter: PlannedDrafter) -> int:
    assert drafter.mask_token is not None  # of every PARD model that is planned
    return drafter.mask_token
