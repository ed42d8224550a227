"""One adaptation: from the texts of the memory to a version of the draft, kept if it predicts held-out texts better.

The texts are split by conversation, the target reads them, the draft is trained to predict what the target does, and
both drafts are compared on the conversations that were held out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from time import time
from typing import Any, Protocol

from edgespec.adapt.course import AllTexts, Course, Measure, Return
from edgespec.adapt.evaluate import compare, expected_tokens, require_positions
from edgespec.adapt.footprint import estimate_training_bytes
from edgespec.adapt.options import TrainOptions, Weights
from edgespec.adapt.pace import Pace, StopReason
from edgespec.adapt.progress import Progress, TrainResult
from edgespec.adapt.recipes import (
    BATCH_TOKENS,
    RANK,
    TRAINED,
    Materials,
    Trainee,
    measure_draft,
    open_trainee,
)
from edgespec.adapt.run_folder import open_run
from edgespec.adapt.texts import Split, TrainingText, count_tokens, read_texts
from edgespec.backends import open_model
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import DoesNotFit, DraftRefused, InvalidRequest
from edgespec.hub.hub import Hub
from edgespec.memory.store import TextStore
from edgespec.planner.plan import LoadConfig, Plan, PlannedDrafter, PlannedModel, Reporter, fetch, plan
from edgespec.planner.vocabulary import open_vocabulary
from edgespec.registry.adapted import AdaptedDrafts, Card, Gain
from edgespec.registry.resolve import Source
from edgespec.registry.schema import Registry
from edgespec.registry.tokenizer_compat import identify_tokenizer
from edgespec.units import gib

_MAX_HELD_OUT = 50_000  # tokens: enough for intervals of a few percent, and no long wait
_LORA_ABOVE = 2**30  # bytes that training all weights takes


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """What to train, and how.

    load       the target and its draft; `load.draft` names the draft, or is 'auto' for the one that is paired with it
    weights    what is trained: all, or LoRA; None: all where that takes less than 1 GiB
    documents  whether to learn from added documents too
    course     which texts are trained on, and from which version on
    """

    load: LoadConfig
    weights: Weights | None = None
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
        drafter, model = _find_draft(planned)
        target_path, base_path = (self._fetch(source) for source in (planned.target, model.source))
        pair = self._drafts.pair(target_path, base_path)
        returned = config.course.choose_start(pair, base_path, self._measuring(config, drafter))
        active = pair.active()
        start = base_path if active is None else active.path
        weights = config.weights or _choose_weights(drafter, start)
        folder = pair.folder / config.course.folder
        options = json.dumps([weights, config.documents, pair.active_number(), asdict(config.train)])
        with open_run(folder, options) as began_s, ExitStack() as opened:
            split = self._read_split(config, began_s)
            _check_memory(planned, drafter, start, weights)
            progress = partial(self._reporter.loading, target_path.name)
            target = open_model(planned.backend, target_path, planned.options, progress=progress, check=self._check)
            opened.callback(target.close)
            check = partial(config.pace.wait, self._check)  # what is read and measured waits for engines too
            held_out = _limit(split.held_out)
            materials = Materials(
                target, planned.options, split.train, held_out, config.train, config.pace, folder, check,
                self._reporter.reading,
            )  # fmt: skip
            trainee = open_trainee(drafter, start, weights, materials, opened)
            result, gain = self._train(trainee)
            card = None
            if gain.is_better:
                named = Card(
                    **_describe_texts(split.train),
                    method=drafter.spec.name,
                    base=str(model.reference),
                    target=planned.name,
                    loss="cross-entropy" if weights == "bigram" else config.train.loss,
                    gain=gain,
                    minutes=result.seconds / 60,
                    options={"weights": weights, **asdict(config.train)},
                )
                card = pair.add(named, trainee.save)
        return Adaptation(gain, card, result.stopped, returned)

    def _measuring(self, config: AdaptConfig, drafter: PlannedDrafter) -> Measure:
        """Measures drafts on the texts that are held out now, which are read once, when the first one is measured."""
        split = cache(lambda: self._read_split(config, time()))
        check = partial(config.pace.wait, self._check)
        return lambda path: measure_draft(drafter, path, _limit(split().held_out), check)

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

    def _train(self, trainee: Trainee) -> tuple[TrainResult, Gain]:
        """Train, and measure before and after. Raises InvalidRequest on battery, and for answers of one token."""

        def report(progress: Progress) -> None:
            tokens = None
            if progress.held_out is not None:
                tokens = expected_tokens(trainee.measure().values())
            self._reporter.training(progress.step, progress.n_steps, progress.loss, tokens)

        before = trainee.measure()
        require_positions(before)
        result = trainee.train(report)
        if result.stopped == "battery":
            raise InvalidRequest(
                f"the training stopped after {result.step} of {result.n_steps} steps: the machine runs on battery.",
                hint="The same command goes on once it is plugged in, or at once with --on-battery.",
            )
        return result, compare(before, trainee.measure())


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
    if drafter.head is not None or weights == "bigram":
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


def _describe_texts(texts: Sequence[TrainingText]) -> dict[str, Any]:
    """The fields of a card about what was trained on."""
    times = [text.time for text in texts]
    return {
        "n_texts": len(texts), "n_tokens": count_tokens(texts), "first_s": min(times), "last_s": max(times)
    }  # fmt: skip
