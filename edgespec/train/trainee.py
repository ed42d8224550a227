"""How each kind of draft is opened, trained, measured and saved."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.backends import Model
from edgespec.backends.mlx.library import device, load_mlx
from edgespec.errors import BackendUnavailable, DraftRefused
from edgespec.installation import install_command
from edgespec.models.drafts import DrafterPlan
from edgespec.progress import notice
from edgespec.train.evaluate import Matrix, measure_chains
from edgespec.train.options import Progress, Throttle, TrainOptions, Weights
from edgespec.train.parts import Parts
from edgespec.train.teacher import Teacher
from edgespec.train.texts import MIN_HELD_OUT, TrainingText

if TYPE_CHECKING:
    from edgespec.train.student import Student


DEPTH = 4  # tokens of the drafts whose gain is measured
RANK = 16  # of LoRA
_SAMPLE = 2  # held-out texts, which tell how long all take


@dataclass(frozen=True, slots=True)
class Materials:
    """What a draft is trained and measured with.

    folder    of the checkpoints, and of what the target says of the texts
    reading   gets the numbers of tokens that the target has read, and of all
    reading_s seconds in which it reads texts to train on; it leaves out what it has not read then
    """

    target: Model
    target_path: Path
    train: Sequence[TrainingText]
    held_out: Sequence[TrainingText]
    options: TrainOptions
    throttle: Throttle
    folder: Path
    reading: Callable[[int, int], None]
    reading_s: float = inf


@dataclass(frozen=True, slots=True)
class Trainee:
    """A draft in training.

    texts          that it is trained on
    train          trains it, from the last checkpoint on, and reports each step
    measure_first  the matrices of the first n held-out texts, for drafts of DEPTH tokens
    n_held_out     how many of them are measured
    save           writes the draft to a path, which it creates
    """

    texts: Sequence[TrainingText]
    train: Callable[[Callable[[Progress], None]], Progress]
    measure_first: Callable[[int], Mapping[str, Matrix]]
    n_held_out: int
    save: Callable[[Path], None]

    def measure(self) -> Mapping[str, Matrix]:
        """The matrices of the held-out texts. Raises Cancelled, BackendError."""
        return self.measure_first(self.n_held_out)

    def fit(self, seconds: float, clock: Callable[[], float]) -> tuple[Trainee, float]:
        """(the same with as many held-out texts as are measured in `seconds` of `clock`, but eight at least, and what
        these take). Raises Cancelled, BackendError.
        """
        self.measure_first(1)  # the first one loads the weights
        start_s = clock()
        self.measure_first(_SAMPLE)
        each_s = (clock() - start_s) / min(_SAMPLE, self.n_held_out)
        n = int(min(self.n_held_out, max(MIN_HELD_OUT, seconds / each_s))) if each_s else self.n_held_out
        return replace(self, n_held_out=n), n * each_s


def open_trainee(
    drafter: DrafterPlan, path: Path, weights: Weights, materials: Materials, opened: ExitStack
) -> Trainee:
    """The draft at `path`, of the kind of `drafter`; what is opened for it is closed with `opened`.

    Raises EdgespecError, Cancelled.
    """
    if drafter.head is not None:
        if weights == "lora":
            raise DraftRefused("heads are small, and are trained whole.", hint="Use --method full.")
        return open_head(drafter, path, materials, opened)
    student = open_student(path)
    from edgespec.train.objectives import distillation

    session = materials.target.open_session()
    opened.callback(session.close)
    if weights == "lora":
        student.train_lora(RANK)
    else:
        student.train_all()
    teacher = Teacher(session, student.vocab_size)
    parts = _make_parts(materials.train, teacher, materials, materials.reading_s)
    held_out = materials.held_out
    return Trainee(
        texts=parts.used_texts,
        train=_descend(student.network, distillation, parts, materials),
        measure_first=lambda n: measure_chains(student.network, held_out[:n], DEPTH),
        n_held_out=len(held_out),
        save=student.save,
    )


def open_student(path: Path) -> Student:
    """The draft model at `path` as a trainable network. Raises BackendUnavailable without MLX; see Student.open."""
    load_trainer()
    from edgespec.train.student import Student

    return Student.open(path)


def load_trainer() -> None:
    """Import MLX. Raises BackendUnavailable."""
    try:
        load_mlx()
    except BackendUnavailable as error:
        raise BackendUnavailable(
            f"a draft is trained by MLX, and {error.message}", hint=f"Install it: {install_command('edgespec[adapt]')}."
        ) from error


def notice_slow_blas() -> None:
    """Tell the user if MLX computes on a processor with the reference BLAS of its wheel. Raises BackendUnavailable
    without MLX.
    """
    load_trainer()
    if sys.platform == "linux" and not device().on_gpu and "LD_PRELOAD" not in os.environ:
        notice(
            "MLX's wheels have a slow BLAS on Linux; OpenBLAS trains several times faster: docs/adapt.md has the line"
            " that preloads it."
        )


def measure_draft(drafter: DrafterPlan, path: Path, texts: Sequence[TrainingText]) -> dict[str, Matrix]:
    """The matrices of the draft model at `path`. Raises DraftRefused for a head, which needs its target."""
    if drafter.head is not None:
        raise DraftRefused(
            "heads are not trained on the newest texts alone.", hint="Use `edgespec adapt` without --newest."
        )
    return measure_chains(open_student(path).network, texts, DEPTH)


def open_head(
    drafter: DrafterPlan, path: Path, materials: Materials, opened: ExitStack, *, is_new: bool = False
) -> Trainee:
    spec, target = drafter.head, materials.target
    if spec is None or drafter.is_in_target:
        raise DraftRefused(
            "only heads in a file or folder of their own can be trained.", hint="Name that with --draft."
        )
    load_trainer()
    from edgespec.train.head_arrays import read_parts
    from edgespec.train.head_student import HeadStudent, measure_heads, recursion

    parts = read_parts(target, materials.target_path)
    student = HeadStudent(path, spec, parts, target.layer_count, is_new=is_new)

    def read(texts: Sequence[TrainingText], limit_s: float) -> Parts:
        session = target.open_session()
        opened.callback(session.close)
        return _make_parts(texts, Teacher(session, layers=student.layers), materials, limit_s)

    held_out, train = read(materials.held_out, inf), read(materials.train, materials.reading_s)
    return Trainee(
        texts=train.used_texts,
        train=_descend(student.network, recursion, train, materials, student.network.is_inner),
        measure_first=lambda n: measure_heads(student.network, held_out, DEPTH, n),
        n_held_out=len(held_out.texts),
        save=student.save,
    )


def _make_parts(texts: Sequence[TrainingText], teacher: Teacher, materials: Materials, limit_s: float) -> Parts:
    """The parts of `texts`, of which the target has read as many as are kept. Raises Cancelled, BackendError."""
    parts = Parts(texts, teacher, materials.folder, seed=materials.options.seed)
    parts.fill(materials.reading, limit_s, materials.throttle.allowance.clock)
    return parts


def _descend(
    network: Any,
    objective: Callable[[Any, Any], Any],
    parts: Parts,
    materials: Materials,
    is_inner: Callable[[str, Any], bool] = lambda path, weight: False,
) -> Callable[[Callable[[Progress], None]], Progress]:
    from edgespec.train.trainer import Trainer

    trainer = Trainer(network, objective, parts, materials.options, materials.folder, materials.throttle, is_inner)
    return lambda report: trainer.run(report)
