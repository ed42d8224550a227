"""One adaptation: from the texts of the memory to a version of the draft, kept if it predicts held-out texts better.

The texts are split by conversation, the target reads them, the draft is trained to predict what the target does, and
both drafts are compared on the conversations that were held out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from edgespec.adapt.course import AllTexts, Course, Measure, Return
from edgespec.adapt.evaluate import Matrix, compare, expected_tokens, measure_chains
from edgespec.adapt.footprint import estimate_training_bytes
from edgespec.adapt.options import TrainOptions
from edgespec.adapt.pace import Pace, StopReason
from edgespec.adapt.student import Student
from edgespec.adapt.teacher import RowStore, Teacher
from edgespec.adapt.texts import Split, TrainingText, count_tokens, read_texts
from edgespec.backends import Model, open_model
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import CacheError, DoesNotFit, DraftRefused, reason_of
from edgespec.files import write_atomically
from edgespec.hub.hub import Hub
from edgespec.memory.store import TextStore
from edgespec.planner.plan import LoadConfig, Plan, PlannedModel, Reporter, fetch, plan
from edgespec.planner.vocabulary import open_vocabulary
from edgespec.registry.adapted import AdaptedDrafts, AdaptedPair, Card, Gain
from edgespec.registry.resolve import Source
from edgespec.registry.schema import Registry
from edgespec.registry.tokenizer_compat import identify_tokenizer
from edgespec.units import gib

if TYPE_CHECKING:
    from edgespec.adapt.trainer import TrainResult

Method = Literal["full", "lora"]
METHODS: tuple[Method, ...] = get_args(Method)
DEPTH = 4  # tokens of the drafts whose gain is measured
RANK = 16  # of LoRA
BATCH_TOKENS = 1024
_MAX_HELD_OUT = 50_000  # tokens: enough for intervals of a few percent, and no long wait
_LORA_ABOVE = 2**30  # bytes that training all weights takes


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """What to train, and how.

    load       the target and its draft; `load.draft` names the draft, or is 'auto' for the one that is paired with it
    method     all weights, or LoRA; None: all where that takes less than 1 GiB
    documents  whether to learn from added documents too
    course     which texts are trained on, and from which version on
    """

    load: LoadConfig
    method: Method | None = None
    train: TrainOptions = field(default_factory=TrainOptions)
    documents: bool = True
    pace: Pace = field(default_factory=Pace)
    course: Course = AllTexts()  # noqa: RUF009 - it has no state


class AdaptReporter(Reporter, Protocol):
    """Receives the progress of an adaptation."""

    def reading(self, done: int, total: int) -> None:
        """`done` of `total` tokens are read by the target."""

    def training(self, step: int, n_steps: int, loss: float, tokens: float | None) -> None:
        """After a step; `tokens` of a round on held-out texts are known after each epoch, else None."""


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The result of a run.

    gain      of the trained draft over the one that it was made from, which was in use
    card      of the version that is kept; None where it gained nothing
    stopped   why the training ended early; None where it did not
    returned  the version that was put in use before the training; None where none was
    """

    gain: Gain
    card: Card | None
    stopped: StopReason | None
    returned: Return | None = None


class Adapter:
    """Runs adaptations with the models, texts and versions of this machine."""

    def __init__(
        self,
        registry: Registry,
        hub: Hub,
        texts: Path,
        drafts: AdaptedDrafts,
        reporter: AdaptReporter,
        check: CheckCancelled,
    ) -> None:
        """`texts` is the folder of the memory. The reporter is called on the thread of `run`."""
        self._registry = registry
        self._hub = hub
        self._texts = texts
        self._drafts = drafts
        self._reporter = reporter
        self._check = check

    def run(self, config: AdaptConfig) -> Adaptation:
        """Train the draft, and keep it if it gains. A run that was stopped or killed goes on.

        Texts and memory are known to suffice before weights are loaded. Raises EdgespecError, Cancelled.
        """
        planned = plan(replace(config.load, memory=None, adapted=None), self._registry, self._hub, self._reporter)
        drafter = _find_draft(planned)
        target_path, base_path = (self._fetch(source) for source in (planned.target, drafter.source))
        pair = self._drafts.pair(target_path, base_path)
        returned = config.course.choose_start(pair, base_path, self._measuring(config))
        active = pair.active()
        start = base_path if active is None else active.path
        method = config.method or _choose_method(start)
        with _open_run(pair, config, method) as (folder, began_s), ExitStack() as opened:
            split = self._read_split(config, began_s)
            _check_memory(planned, start, method)
            progress = partial(self._reporter.loading, target_path.name)
            target = open_model(planned.backend, target_path, planned.options, progress=progress, check=self._check)
            opened.callback(target.close)
            student = Student.open(start)
            trained = self._train(student, target, split, config, method, folder)
            card = None
            if trained.gain.is_better:
                card = pair.add(_describe(planned, drafter, split, config, method, trained), student.save)
        return Adaptation(trained.gain, card, trained.result.stopped, returned)

    def _measuring(self, config: AdaptConfig) -> Measure:
        """Measures drafts on the texts that are held out now, which are read once, when the first one is measured."""
        split = cache(lambda: self._read_split(config, time()))
        check = partial(config.pace.wait, self._check)
        return lambda path: measure_chains(Student.open(path).network, _limit(split().held_out), DEPTH, check)

    def _fetch(self, source: Source) -> Path:
        return fetch(source, self._hub, self._reporter, self._check)

    def _read_split(self, config: AdaptConfig, began_s: float) -> Split:
        """The texts that were stored before the run began. Raises InvalidRequest for too few."""
        with open_vocabulary(config.load, self._registry, self._hub) as tokenizer:
            identity = identify_tokenizer(tokenizer)
        texts: list[TrainingText] = []
        if self._texts.is_dir():
            with closing(TextStore.open(self._texts)) as store:
                texts = read_texts(store, identity, documents=config.documents)
        return config.course.split([text for text in texts if text.time <= began_s])

    def _train(
        self, student: Student, target: Model, split: Split, config: AdaptConfig, method: Method, folder: Path
    ) -> _Trained:
        """Train `student` from the last checkpoint on, and measure it before and after."""
        from edgespec.adapt.batches import TextBatches
        from edgespec.adapt.losses import distillation
        from edgespec.adapt.trainer import Progress, Trainer

        check = partial(config.pace.wait, self._check)  # what is read and measured waits for engines too

        def measure() -> dict[str, Matrix]:
            return measure_chains(student.network, held_out, DEPTH, check)

        def report(progress: Progress) -> None:
            tokens = None
            if progress.held_out is not None:
                tokens = expected_tokens(measure().values())
            self._reporter.training(progress.step, progress.n_steps, progress.loss, tokens)

        held_out = _limit(split.held_out)
        before = measure()
        with closing(target.open_session(self._check)) as session:
            teacher = Teacher(session, check)
            batches = []
            for texts in (split.train, held_out):
                rows = RowStore(teacher, [text.tokens for text in texts])
                rows.fill(self._reporter.reading)
                batches.append(TextBatches(texts, rows, batch_tokens=BATCH_TOKENS, seed=config.train.seed))
            if method == "lora":
                student.train_lora(RANK)
            else:
                student.train_all()
            trainer = Trainer(
                student.network, distillation(config.train.loss), batches[0], config.train, folder,
                pace=config.pace, held_out=batches[1],
            )  # fmt: skip
            result = trainer.run(report, self._check)
        return _Trained(result, compare(before, measure()))


@dataclass(frozen=True, slots=True)
class _Trained:
    result: TrainResult
    gain: Gain


def _find_draft(planned: Plan) -> PlannedModel:
    """The draft model to train. Raises DraftRefused where there is none."""
    for each in planned.drafters:
        if each.spec.name == "model" and each.model is not None:
            return each.model
    raise DraftRefused(
        f"there is no draft model for {planned.name} to train.",
        hint="Name one with --draft REF: a small model with the same tokenizer.",
    )


def _choose_method(path: Path) -> Method:
    return "full" if estimate_training_bytes(path, BATCH_TOKENS) <= _LORA_ABOVE else "lora"


def _check_memory(planned: Plan, draft: Path, method: Method) -> None:
    """Raise DoesNotFit where the target and the training need more than is free."""
    training = estimate_training_bytes(draft, BATCH_TOKENS, rank=RANK if method == "lora" else None)
    needed, free = planned.fit.target.total + training, planned.fit.memory.usable
    if needed > free:
        raise DoesNotFit(
            f"training needs {gib(needed)}: {gib(planned.fit.target.total)} for the target, {gib(training)} for the"
            f" draft; {gib(free)} are free.",
            hint="Use --method lora, close other programs, or name a smaller draft."
            if method == "full"
            else "Close other programs, or name a smaller draft.",
        )


def _limit(texts: Sequence[TrainingText]) -> list[TrainingText]:
    """The latest texts, of whole conversations, of about `_MAX_HELD_OUT` tokens."""
    sizes: dict[str, int] = {}
    for text in reversed(texts):
        sizes[text.source] = sizes.get(text.source, 0) + text.n_new
    kept, total = set(), 0
    for source, size in sizes.items():
        if total >= _MAX_HELD_OUT:
            break
        kept.add(source)
        total += size
    return [text for text in texts if text.source in kept]


def _describe(
    planned: Plan, drafter: PlannedModel, split: Split, config: AdaptConfig, method: Method, trained: _Trained
) -> Card:
    times = [text.time for text in split.train]
    return Card(
        method="model",
        base=str(drafter.reference),
        target=planned.name,
        n_texts=len(split.train),
        n_tokens=count_tokens(split.train),
        first_s=min(times),
        last_s=max(times),
        loss=config.train.loss,
        gain=trained.gain,
        minutes=trained.result.seconds / 60,
        options={"weights": method, **asdict(config.train)},
    )


@contextmanager
def _open_run(pair: AdaptedPair, config: AdaptConfig, method: Method) -> Iterator[tuple[Path, float]]:
    """The folder of a run, and when it began, which is earlier for one that goes on; removed after a complete one.

    Raises CacheError.
    """
    folder = pair.folder / config.course.folder
    options = json.dumps([method, config.documents, pair.active_number(), asdict(config.train)])
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder / "run.json"
        began_s = _read_start(state, options)
        if began_s is None:
            began_s = time()
            write_atomically(state, json.dumps({"began_s": began_s, "options": options}))
    except OSError as error:
        raise CacheError(
            f"{folder} cannot be written: {reason_of(error)}.", hint="Check its permissions, or free some space."
        ) from error
    yield folder, began_s
    shutil.rmtree(folder, ignore_errors=True)


def _read_start(state: Path, options: str) -> float | None:
    """When the run in a folder began; None where there is none with these options."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(state.read_text(encoding="utf-8"))
        if found["options"] == options:
            return float(found["began_s"])
    return None
