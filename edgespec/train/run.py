"""One adaptation: from the texts of the memory to a version of the draft, kept if it predicts held-out texts better.

The texts are split by conversation, the target reads them, the draft is trained to predict what the target does, and
both drafts are compared on the conversations that were held out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from edgespec.backends import Model, open_model
from edgespec.errors import DoesNotFit, DraftRefused, InvalidRequest
from edgespec.memory.administration import TextStore
from edgespec.models.draft_words import TRAINED
from edgespec.models.drafts import DrafterPlan, PlannedModel
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan, plan
from edgespec.models.registry import Registry
from edgespec.models.resolve import fetch_source
from edgespec.models.target import open_vocabulary
from edgespec.models.tokenizer_compat import identify_tokenizer
from edgespec.models.versions import RUN, AdaptedDrafts, AdaptedPair, Card, Gain
from edgespec.progress import Reporter, loading
from edgespec.train.evaluate import Matrix, Return, compare, expected_tokens, require_positions, return_to_best
from edgespec.train.memory_estimate import estimate_training_bytes
from edgespec.train.options import Allowance, Progress, StopReason, Throttle, TrainOptions, Weights
from edgespec.train.parts import BATCH_TOKENS
from edgespec.train.run_folder import open_run
from edgespec.train.texts import TrainingText, count_tokens, read_texts, split_texts
from edgespec.train.trainee import RANK, Materials, Trainee, measure_draft, open_trainee
from edgespec.units import gib

_READING = 0.4  # of the time, in which the target reads the texts
_LORA_ABOVE = 2**30  # bytes that training all weights takes


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """What to train, and how.

    load       the target and its draft; `load.draft` names the draft, or is 'auto' for the one that is paired with it
    weights    what is trained: all, or LoRA; None: all if that takes less than 1 GiB
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
    card      of the version that is kept; None if it gained nothing
    stopped   why the training ended early; None if it did not
    returned  the version that was put in use before the training; None if none was
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

    def open_target(self, planned: Plan, path: Path, opened: ExitStack) -> Model:
        """The target in `path`, which is closed with `opened`. Raises EdgespecError, Cancelled."""
        with loading(path.name):
            target = open_model(planned.backend, path, planned.options)
        opened.callback(target.close)
        return target

    def report_reading(self, allowance: Allowance, done: int, total: int) -> None:
        """The target has read `done` of `total` tokens. Raises InvalidRequest when the time of the whole run is up."""
        self.reporter.reading(done, total)
        if allowance.left_s <= 0:
            raise time_is_up(f"{done:,} of {total:,} tokens are read")


def plan_training(config: AdaptConfig, registry: Registry, hub: Hub) -> Plan:
    """The target with a draft that can be trained. Raises EdgespecError."""
    planned = plan(replace(config.load, memory=None, adapted=None), registry, hub)
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
        with config.throttle.pausing():  # what is read and measured waits for engines too
            return self._run(config, planned)

    def _run(self, config: AdaptConfig, planned: Plan) -> Adaptation:
        drafter, model = _find_draft(planned)
        target_path, base_path = (fetch_source(source, self.hub) for source in (planned.target, model.source))
        pair = self.drafts.pair(target_path, base_path)
        returned = None
        if config.newest:
            _, held_out = self._split_texts(config)
            returned = return_to_best(pair, base_path, lambda path: measure_draft(drafter, path, held_out))
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
                reading=partial(self.report_reading, config.throttle.allowance),
                reading_s=_READING * config.throttle.allowance.limit_s,
            )
            trainee = open_trainee(drafter, start, weights, materials, opened)
            allowance = config.throttle.allowance
            before, allowance.reserve_s = _time(trainee.measure, allowance)
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
                allowance=allowance,
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


def time_is_up(reached: str, condition: str = "") -> InvalidRequest:
    """The error of a run that `reached` some point when its time was up; it goes on under `condition`."""
    return InvalidRequest(
        f"the time is up: {reached}.", hint=f"The same command goes on{f', {condition}' if condition else ''}."
    )


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
    allowance: Allowance,
) -> Adaptation:
    """Train, and add a version to `pair` if it gains over a draft of the matrices `before`.

    `method`, `base`, `target` and `options` are fields of its card. Raises InvalidRequest on battery, BackendError,
    CacheError, Cancelled.
    """

    def report(progress: Progress) -> None:
        tokens = None
        if progress.is_epoch:
            measured, allowance.reserve_s = _time(trainee.measure, allowance)
            tokens = expected_tokens(measured.values())
        reporter.training(progress.step, progress.n_steps, progress.loss, tokens)

    result = trainee.train(report)
    if result.stopped == "battery":
        raise stopped_on_battery(f"the training stopped after {result.step} of {result.n_steps} steps")
    gain, card = compare(before, trainee.measure()), None
    if gain.is_better:
        named = Card(method, base, target, count_tokens(trainee.texts), gain, result.seconds / 60, options)
        card = pair.add(named, trainee.save)
    return Adaptation(gain, card, result.stopped)


def _time(measure: Callable[[], Mapping[str, Matrix]], allowance: Allowance) -> tuple[Mapping[str, Matrix], float]:
    """What `measure` returns, and its seconds without pauses."""
    start_s = allowance.clock()
    return measure(), allowance.clock() - start_s


def _find_draft(planned: Plan) -> tuple[DrafterPlan, PlannedModel]:
    """The draft to train, and what is loaded for it. Raises DraftRefused if there is none."""
    for name in TRAINED:
        for each in planned.drafters:
            if each.spec.name == name and each.model is not None:
                return each, each.model
    raise DraftRefused(
        f"there is no draft of {planned.name} that can be trained.",
        hint="Name one with --draft REF: a small model with the same tokenizer.",
    )


def _choose_weights(drafter: DrafterPlan, path: Path) -> Weights:
    if drafter.head is not None:
        return "full"
    return "full" if estimate_training_bytes(path, BATCH_TOKENS) <= _LORA_ABOVE else "lora"


def _check_memory(planned: Plan, drafter: DrafterPlan, draft: Path, weights: Weights) -> None:
    """Raise DoesNotFit if the target and the training need more than is free. Heads are small beside targets."""
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
