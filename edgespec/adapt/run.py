"""One adaptation: from the texts of the memory to a version of the draft, kept if it predicts held-out texts better.

The texts are split by conversation, the target reads them, the draft is trained to predict what the target does, and
both drafts are compared on the conversations that were held out.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgespec.adapt.evaluate import (
    Matrix,
    Return,
    compare,
    expected_tokens,
    measure_chains,
    require_positions,
    return_to_best,
)
from edgespec.adapt.options import Progress, StopReason, Throttle, TrainOptions, Weights
from edgespec.adapt.teacher import BATCH_TOKENS, Parts, Teacher
from edgespec.adapt.texts import TrainingText, count_tokens, read_texts, split_texts
from edgespec.backends import Model, open_model
from edgespec.backends.mlx.library import device, load_mlx
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendUnavailable, CacheError, DoesNotFit, DraftRefused, InvalidRequest, reason_of
from edgespec.files import lock_file
from edgespec.formats.gguf_validate import read_file, read_gguf_config
from edgespec.formats.head_file import read_folder_shapes
from edgespec.formats.heads import unpack_shapes
from edgespec.formats.mlx_folder import read_folder
from edgespec.hub.hub import Hub
from edgespec.installation import install_command
from edgespec.memory.store import TextStore
from edgespec.planner.draft_finder import PlannedDrafter, PlannedModel
from edgespec.planner.plan import LoadConfig, Plan, Reporter, fetch, open_vocabulary, plan
from edgespec.registry.adapted import RUN, AdaptedDrafts, AdaptedPair, Card, Gain
from edgespec.registry.schema import Registry
from edgespec.registry.tokenizer_compat import identify_tokenizer
from edgespec.units import gib

if TYPE_CHECKING:
    from edgespec.adapt.student import Student


_LORA_ABOVE = 2**30  # bytes that training all weights takes


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """What to train, and how.

    load       the target and its draft; `load.draft` names the draft, or is 'auto' for the one that is paired with it
    weights    what is trained: all, or LoRA; None: all where that takes less than 1 GiB
    documents  whether to learn from added documents too
    newest     train on the newest texts, from the version that predicts them best
    """

    load: LoadConfig
    weights: Weights | None = None
    train: TrainOptions = field(default_factory=TrainOptions)
    documents: bool = True
    throttle: Throttle = field(default_factory=Throttle)
    newest: bool = False


class AdaptReporter(Reporter, Protocol):
    """Receives the progress of a training."""

    def writing(self, share: float, n: int) -> None:
        """`share` of the texts for a new head are written; they have `n` tokens of answers."""

    def reading(self, done: int, total: int) -> None:
        """`done` of `total` tokens are read by the target."""

    def training(self, step: int, n_steps: int, loss: float, tokens: float | None) -> None:
        """Reports a step; `tokens` of a round on held-out texts are known after each epoch, else None."""


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The result of a run.

    gain      of the trained draft over the one that it was made from, which was in use; of a new head over `base`
    card      of the version that is kept; None where it gained nothing
    stopped   why the training ended early; None where it did not
    returned  the version that was put in use before the training; None where none was
    base      what a new head is compared with
    goes_on   whether the next run trains further what has gained too little
    """

    gain: Gain
    card: Card | None
    stopped: StopReason | None
    returned: Return | None = None
    base: str = ""
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """Trains with the models and versions of this machine. `reporter` is called on the thread of `run`."""

    registry: Registry
    hub: Hub
    drafts: AdaptedDrafts
    reporter: AdaptReporter
    check: CheckCancelled

    def open_target(self, planned: Plan, path: Path, opened: ExitStack) -> Model:
        """The target in `path`, which is closed with `opened`. Raises EdgespecError, Cancelled."""
        progress = partial(self.reporter.loading, path.name)
        target = open_model(planned.backend, path, planned.options, progress=progress, check=self.check)
        opened.callback(target.close)
        return target


def plan_training(config: AdaptConfig, registry: Registry, hub: Hub, reporter: Reporter) -> Plan:
    """The target with a draft that can be trained. Raises EdgespecError."""
    planned = plan(replace(config.load, memory=None, adapted=None), registry, hub, reporter)
    _find_draft(planned)
    return planned


@dataclass(frozen=True, slots=True)
class Adapter(Training):
    """Runs adaptations to the texts of the memory in the folder `texts`."""

    texts: Path

    def run(self, config: AdaptConfig, planned: Plan) -> Adaptation:
        """Train the draft, and keep it if it gains. A run that was stopped or killed goes on.

        `planned` is of `plan_training`. Texts and memory are known to suffice before weights are loaded. Raises
        EdgespecError, Cancelled.
        """
        drafter, model = _find_draft(planned)
        target_path, base_path = (
            fetch(source, self.hub, self.reporter, self.check) for source in (planned.target, model.source)
        )
        pair = self.drafts.pair(target_path, base_path)
        check = partial(config.throttle.wait, self.check)  # what is read and measured waits for engines too
        returned = None
        if config.newest:
            _, held_out = self._split_texts(config)
            returned = return_to_best(pair, base_path, lambda path: measure_draft(drafter, path, held_out, check))
        active = pair.active()
        start = base_path if active is None else active.path
        weights = config.weights or _choose_weights(drafter, start)
        folder = pair.folder / (f"{RUN}-newest" if config.newest else RUN)
        options = replace(config.train, start=f"version {pair.active_number()}, {weights}")
        with open_run(folder), ExitStack() as opened:
            train, held_out = self._split_texts(config)
            _check_memory(planned, drafter, start, weights)
            materials = Materials(
                target=self.open_target(planned, target_path, opened),
                target_path=target_path,
                train=train,
                held_out=held_out,
                options=options,
                throttle=config.throttle,
                folder=folder,
                check=check,
                reading=self.reporter.reading,
            )
            trainee = open_trainee(drafter, start, weights, materials, opened)
            before = trainee.measure()
            require_positions(before)
            done = train_and_keep(
                trainee,
                before,
                pair,
                self.reporter,
                method=drafter.spec.name,
                base=str(model.reference),
                target=planned.name,
                options={"weights": weights, **asdict(options)},
            )
        return replace(done, returned=returned)

    def _split_texts(self, config: AdaptConfig) -> tuple[list[TrainingText], list[TrainingText]]:
        """(texts to train on, texts to measure with). Raises InvalidRequest for too few."""
        with open_vocabulary(config.load, self.registry, self.hub) as tokenizer:
            identity = identify_tokenizer(tokenizer)
        texts: list[TrainingText] = []
        if self.texts.is_dir():
            with closing(TextStore.open(self.texts)) as store:
                texts = read_texts(store, identity, documents=config.documents)
        return split_texts(texts, newest=config.newest)


def stopped_on_battery(reached: str) -> InvalidRequest:
    """The error of a run that `reached` some point and stops there."""
    return InvalidRequest(
        f"{reached}: the machine runs on battery.",
        hint="The same command goes on once it is plugged in, or at once with --on-battery.",
    )


def train_and_keep(
    trainee: Trainee,
    before: Mapping[str, Matrix],
    pair: AdaptedPair,
    reporter: AdaptReporter,
    *,
    method: str,
    base: str,
    target: str,
    options: Mapping[str, Any],
) -> Adaptation:
    """Train, and add a version to `pair` if it gains over a draft of the matrices `before`.

    The last four are fields of its card. Raises InvalidRequest on battery, BackendError, CacheError, Cancelled.
    """

    def report(progress: Progress) -> None:
        tokens = expected_tokens(trainee.measure().values()) if progress.is_epoch else None
        reporter.training(progress.step, progress.n_steps, progress.loss, tokens)

    result = trainee.train(report)
    if result.stopped == "battery":
        raise stopped_on_battery(f"the training stopped after {result.step} of {result.n_steps} steps")
    gain, card = compare(before, trainee.measure()), None
    if gain.is_better:
        named = Card(method, base, target, count_tokens(trainee.texts), gain, result.seconds / 60, options)
        card = pair.add(named, trainee.save)
    return Adaptation(gain, card, result.stopped)


def _find_draft(planned: Plan) -> tuple[PlannedDrafter, PlannedModel]:
    """The draft to train, and what is loaded for it. Raises DraftRefused where there is none."""
    for name in TRAINED:
        for each in planned.drafters:
            if each.spec.name == name and each.model is not None:
                return each, each.model
    raise DraftRefused(
        f"there is no draft of {planned.name} that can be trained.",
        hint="Name one with --draft REF: a small model with the same tokenizer.",
    )


def _choose_weights(drafter: PlannedDrafter, path: Path) -> Weights:
    if drafter.head is not None:
        return "full"
    return "full" if estimate_training_bytes(path, BATCH_TOKENS) <= _LORA_ABOVE else "lora"


def _check_memory(planned: Plan, drafter: PlannedDrafter, draft: Path, weights: Weights) -> None:
    """Raise DoesNotFit where the target and the training need more than is free. Heads are small beside targets."""
    if drafter.head is not None:
        return
    training = estimate_training_bytes(draft, BATCH_TOKENS, rank=RANK if weights == "lora" else None)
    needed, free = planned.fit.target.total + training, planned.fit.memory.usable
    if needed > free:
        raise DoesNotFit(
            f"training needs {gib(needed)}: {gib(planned.fit.target.total)} for the target, {gib(training)} for the"
            f" draft; {gib(free)} are free.",
            hint="Use --method lora, close other programs, or name a smaller draft."
            if weights == "full"
            else "Close other programs, or name a smaller draft.",
        )


# How each kind of draft is opened, trained, measured and saved.


DEPTH = 4  # tokens of the drafts whose gain is measured
RANK = 16  # of LoRA
TRAINED = ("model", "mtp", "eagle", "eagle3")
"""The drafters that can be trained, as `auto` chooses among those of a target."""


@dataclass(frozen=True, slots=True)
class Materials:
    """What a draft is trained and measured with.

    folder    of the checkpoints, and of what the target says of the texts
    check     polled between forwards; waits while engines work
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
    check: CheckCancelled
    reading: Callable[[int, int], None]
    reading_s: float = inf


@dataclass(frozen=True, slots=True)
class Trainee:
    """A draft in training.

    texts    that it is trained on
    train    trains it, from the last checkpoint on, and reports each step
    measure  the matrices of the held-out conversations, for drafts of DEPTH tokens
    save     writes the draft to a path, which it creates
    """

    texts: Sequence[TrainingText]
    train: Callable[[Callable[[Progress], None]], Progress]
    measure: Callable[[], Mapping[str, Matrix]]
    save: Callable[[Path], None]


def open_trainee(
    drafter: PlannedDrafter, path: Path, weights: Weights, materials: Materials, opened: ExitStack
) -> Trainee:
    """The draft at `path`, of the kind of `drafter`; what is opened for it is closed with `opened`.

    Raises EdgespecError, Cancelled.
    """
    if drafter.head is not None:
        if weights == "lora":
            raise DraftRefused("heads are small, and are trained whole.", hint="Use --method full.")
        return open_head(drafter, path, materials, opened)
    student = open_student(path)
    from edgespec.adapt.trainer import distillation

    session = materials.target.open_session(materials.check)
    opened.callback(session.close)
    if weights == "lora":
        student.train_lora(RANK)
    else:
        student.train_all()
    teacher = Teacher(session, materials.check, student.vocab_size)
    parts = _make_parts(materials.train, teacher, materials, materials.reading_s)
    return Trainee(
        texts=parts.used_texts,
        train=_descend(student.network, distillation, parts, materials),
        measure=lambda: measure_chains(student.network, materials.held_out, DEPTH, materials.check),
        save=student.save,
    )


def open_student(path: Path) -> Student:
    """The draft model at `path` as a trainable network. Raises BackendUnavailable without MLX; see Student.open."""
    load_trainer()
    from edgespec.adapt.student import Student

    return Student.open(path)


def load_trainer() -> None:
    """Import MLX. Raises BackendUnavailable."""
    try:
        load_mlx()
    except BackendUnavailable as error:
        raise BackendUnavailable(
            f"a draft is trained by MLX, and {error.message}", hint=f"Install it: {install_command('edgespec[adapt]')}."
        ) from error


def notice_slow_blas(reporter: Reporter) -> None:
    """Tell `reporter` where MLX computes on a processor with the reference BLAS of its wheel. Raises BackendUnavailable
    without MLX.
    """
    load_trainer()
    if sys.platform == "linux" and not device().on_gpu and "LD_PRELOAD" not in os.environ:
        reporter.notice(
            "MLX's wheels have a slow BLAS on Linux; OpenBLAS trains several times faster: docs/adapt.md has the line"
            " that preloads it."
        )


def measure_draft(
    drafter: PlannedDrafter, path: Path, texts: Sequence[TrainingText], check: CheckCancelled
) -> dict[str, Matrix]:
    """The matrices of the draft model at `path`. Raises DraftRefused for a head, which needs its target."""
    if drafter.head is not None:
        raise DraftRefused(
            "heads are not trained on the newest texts alone.", hint="Use `edgespec adapt` without --newest."
        )
    return measure_chains(open_student(path).network, texts, DEPTH, check)


def open_head(
    drafter: PlannedDrafter, path: Path, materials: Materials, opened: ExitStack, *, is_new: bool = False
) -> Trainee:
    spec, target = drafter.head, materials.target
    if spec is None or drafter.is_in_target:
        raise DraftRefused(
            "only heads in a file or folder of their own can be trained.", hint="Name that with --draft."
        )
    load_trainer()
    from edgespec.adapt.head_files import read_parts
    from edgespec.adapt.heads import HeadStudent, measure_heads, recursion

    parts = read_parts(target, materials.target_path)
    student = HeadStudent(path, spec, parts, target.layer_count, is_new=is_new)

    def read(texts: Sequence[TrainingText], limit_s: float) -> Parts:
        session = target.open_session(materials.check)
        opened.callback(session.close)
        return _make_parts(texts, Teacher(session, materials.check, layers=student.layers), materials, limit_s)

    held_out, train = read(materials.held_out, inf), read(materials.train, materials.reading_s)
    return Trainee(
        texts=train.used_texts,
        train=_descend(student.network, recursion, train, materials, student.network.is_inner),
        measure=lambda: measure_heads(student.network, held_out, DEPTH, materials.check),
        save=student.save,
    )


def _make_parts(texts: Sequence[TrainingText], teacher: Teacher, materials: Materials, limit_s: float) -> Parts:
    """The parts of `texts`, of which the target has read as many as are kept. Raises Cancelled, BackendError."""
    parts = Parts(texts, teacher, materials.folder, seed=materials.options.seed)
    parts.fill(materials.reading, limit_s)
    return parts


def _descend(
    network: Any,
    objective: Callable[[Any, Any], Any],
    parts: Parts,
    materials: Materials,
    is_inner: Callable[[str, Any], bool] = lambda path, weight: False,
) -> Callable[[Callable[[Progress], None]], Progress]:
    from edgespec.adapt.trainer import Trainer

    trainer = Trainer(network, objective, parts, materials.options, materials.folder, materials.throttle, is_inner)
    return lambda report: trainer.run(report, materials.check)


# The folder of a training run that is not complete: the same command goes on with it.


@contextmanager
def open_run(folder: Path) -> Iterator[None]:
    """Create the folder of a run, and hold it. It is removed at the end, unless an error has left files in it.

    Raises InvalidRequest where another process holds it, CacheError.
    """
    with ExitStack() as opened:
        try:
            for each in (folder.parent.parent, folder.parent, folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened.enter_context(lock_file(folder / "lock", wait=False))
        except BlockingIOError:
            raise InvalidRequest("this draft is being trained already.", hint="Wait until that has ended.") from None
        except OSError as error:
            raise CacheError(
                f"{folder} cannot be written: {reason_of(error)}.", hint="Check its permissions, or free some space."
            ) from error
        try:
            yield
        except BaseException:
            if [each.name for each in folder.glob("*")] == ["lock"]:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


# Memory that training a draft model needs, estimated from its header; neither weights nor MLX are loaded.


_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
# Numbers in single precision: AdamW's moments of a trained weight; its gradient before and after clipping, and its
# update; and what a token keeps for the backward pass, for each of its numbers in a layer, and for each score. The last
# two are fitted to MLX's peaks.
_MOMENTS, _IN_STEP, _PER_HIDDEN, _PER_LOGIT = 2, 3, 38, 4
_MARGIN = 1.1
BYTES_PER_WEIGHT = 4 * (1 + _MOMENTS + _IN_STEP)
"""Bytes that a trained weight takes, with what a step keeps of it."""


def estimate_training_bytes(path: Path, batch_tokens: int, *, rank: int | None = None) -> int:
    """Bytes to train a draft model with AdamW on batches of so many tokens, in parts of 512 tokens at most.

    rank  of LoRA; None to train all weights

    Raises InvalidModelFile, CacheError.
    """
    (width, n_layers, vocab_size), shapes = _read_sizes(path)
    n_weights = n_trained = sum(map(prod, shapes.values()))
    if rank is not None:
        blocks = [shape for name, shape in shapes.items() if len(shape) == 2 and (".layers." in name or "blk." in name)]
        n_trained = sum(rank * sum(shape) for shape in blocks)
        n_weights += n_trained
    kept = batch_tokens * (_PER_HIDDEN * width * n_layers + _PER_LOGIT * vocab_size)
    return int(_MARGIN * 4 * (n_weights + _MOMENTS * n_trained + max(kept, _IN_STEP * n_trained)))


def _read_sizes(path: Path) -> tuple[list[int], dict[str, tuple[int, ...]]]:
    """(sizes by _SIZES, shapes of the tensors) of a GGUF file or folder."""
    if path.is_dir():
        folder = read_folder(path)
        shapes = unpack_shapes(folder.config, read_folder_shapes(path))
        sizes = [folder.integer(key) or 0 for key in _SIZES]
        return sizes, {name: shape for name, shape in shapes.items() if not name.endswith((".scales", ".biases"))}
    header = read_file(path)
    config = read_gguf_config(header)
    return [config[key] for key in _SIZES], {tensor.name: tensor.shape for tensor in header.tensors}
