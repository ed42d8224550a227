"""A trained head for a target that has none: the target writes texts, a new head learns from them, and is judged.

The head is kept if it predicts held-out answers better than lookups, and than the head in use, beyond chance. A run
that was stopped or killed goes on: texts, what the target says of them, and the state of the training are in files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import Model
from edgespec.drafters.ngram import SuffixLookup, continue_from
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.errors import DraftRefused, InvalidModelFile, InvalidRequest
from edgespec.files import remove_path
from edgespec.formats.head_file import read_head
from edgespec.models.drafts import DrafterPlan
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import plan
from edgespec.models.resolve import fetch_source
from edgespec.models.versions import FIRST, NO_BASE, OWN_TEXTS, RUN, AdaptedPair
from edgespec.progress import QUIET, notice, reporting
from edgespec.train.evaluate import Matrix, expected_tokens, find_rounds
from edgespec.train.options import CHECKPOINT, Allowance, Throttle, TrainOptions
from edgespec.train.own_texts import ConversationFile, write_conversations
from edgespec.train.parts import has_parts
from edgespec.train.run import Adaptation, Training, stopped_on_battery, time_is_up, train_and_keep
from edgespec.train.run_folder import open_run
from edgespec.train.texts import MIN_HELD_OUT, TrainingText, count_tokens
from edgespec.train.trainee import DEPTH, Materials, Trainee, load_trainer, open_head

_CONTEXT = 1024  # tokens of a conversation
_STREAMS = 8  # conversations that are written at once
_LEAST = 10_000  # tokens of answers to train on
_EACH, _MOST = 5, 60  # one conversation of so many is held out, and so many at most
_WRITING, _READING, _MEASURING = 0.25, 0.25, 0.15  # shares of the time; training has the rest
_MUCH = 0.6  # of the time, for writing
_EPOCHS = 8
_RATED = 400  # tokens, after which the rate of writing is known


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What to train.

    load       the target
    questions  that it answers before it writes its own
    n_tokens   of its own answers to learn from; those of earlier runs count
    """

    load: LoadConfig
    questions: Sequence[str] = ()
    n_tokens: int = 500_000
    train: TrainOptions = field(
        default_factory=lambda: TrainOptions(learning_rate=2e-3, muon_rate=0.05, epochs=_EPOCHS)
    )
    throttle: Throttle = field(default_factory=Throttle)


class HeadTrainer(Training):
    """Trains heads."""

    def run(self, config: HeadConfig) -> Adaptation:
        """Train a head, starting from any head in use, and keep it if it is better.

        Raises EdgespecError, Cancelled.
        """
        load_trainer()
        from edgespec.train.head_files import check_target

        throttle, options = config.throttle, config.load.load
        options = replace(options, caches=_STREAMS, context_size=options.context_size or _CONTEXT)
        load = replace(config.load, load=options, memory=None, adapted=None)
        self._refuse_others(replace(load, draft="auto"))
        planned = plan(replace(load, draft="none"), self.registry, self.hub)
        path = fetch_source(planned.target, self.hub)
        pair = self.drafts.new_head(path, planned.backend)
        folder = pair.folder / RUN
        if not (pair.folder / OWN_TEXTS).exists():
            _check_tokens(config.n_tokens)
        with throttle.pausing(), open_run(folder), ExitStack() as opened:
            target = self.open_target(planned, path, opened)
            check_target(target, path, planned.fit.memory.usable - planned.fit.target.total)
            file = ConversationFile(pair.folder / OWN_TEXTS, target.tokenizer.vocab_size)
            has_begun = (folder / CHECKPOINT).exists()  # then it goes on with the texts that it has begun with
            # What was read without a training is of a run whose time was up.
            wanted = _LEAST if has_begun else 2 * _LEAST if has_parts(folder) else config.n_tokens
            if file.n_tokens < wanted:
                self._write_texts(target, file, config)
            train, held_out = split_conversations(file.texts())
            train.reverse()  # the newest ones, which no earlier head has read, are read first
            materials = Materials(
                target=target,
                target_path=path,
                train=train,
                held_out=held_out,
                options=replace(config.train, start=f"version {pair.active_number()}, {len(train)} texts"),
                throttle=throttle,
                folder=folder,
                reading=partial(self.report_reading, throttle.allowance),
                # A training that has begun goes on with what it had read.
                reading_s=0.0 if has_begun else _READING * throttle.allowance.limit_s,
            )
            return self._train(materials, pair, planned.name, opened)

    def _refuse_others(self, load: LoadConfig) -> None:
        """Raise DraftRefused for a target that has a head, which `auto` would prefer."""
        with reporting(QUIET):
            drafters = plan(load, self.registry, self.hub).drafters
        for each in drafters:
            if each.head is not None:
                raise DraftRefused(
                    f"{each.label} is a head for this model already.",
                    hint="`--draft auto` drafts with it; `edgespec adapt` trains it further.",
                )

    def _train(self, materials: Materials, pair: AdaptedPair, target: str, opened: ExitStack) -> Adaptation:
        """Train on texts that are there, and keep the head if it gains; else a first one is kept aside."""
        from edgespec.backends.mlx.model import MlxModel
        from edgespec.train.student import report_unwritable

        active = pair.active()
        first = pair.folder / (FIRST if isinstance(materials.target, MlxModel) else f"{FIRST}.gguf")
        if active is None:
            prepare_first(materials, first)
        start = first if active is None else active.path
        drafter = DrafterPlan(drafter_specs()["eagle3"], head=read_head(start))
        trainee = open_head(drafter, start, materials, opened, is_new=True)
        trainee = _keep_time(trainee, materials.throttle.allowance, 1 if active is None else 2)
        held_out = materials.held_out[: trainee.n_held_out]
        rivals: dict[str, Mapping[str, Matrix]] = {"lookups": measure_lookups(held_out, DEPTH)}
        if active is not None:
            rivals["the head in use"] = trainee.measure()
        base = max(rivals, key=lambda name: expected_tokens(rivals[name].values()))
        done = train_and_keep(
            trainee,
            rivals[base],
            pair,
            self.reporter,
            method="eagle3",
            base=NO_BASE,
            target=target,
            options={"rival": base, **asdict(materials.options)},
            allowance=materials.throttle.allowance,
        )
        goes_on = done.card is None and active is None
        with report_unwritable(first):
            if goes_on:
                trainee.save(materials.folder / first.name)
                remove_path(first)
                (materials.folder / first.name).rename(first)
            else:
                remove_path(first)
        return replace(done, base=base, goes_on=goes_on)

    def _write_texts(self, target: Model, file: ConversationFile, config: HeadConfig) -> None:
        """Write texts up to the wanted number of tokens, or to the end of their time if they suffice then.

        Raises InvalidRequest on battery, and where too few are written when the whole time is up.
        """
        is_told, throttle = False, config.throttle
        allowance, began_s = throttle.allowance, throttle.allowance.clock()
        limit_s = _WRITING * allowance.limit_s
        engine, n_before = Engine(target, (), Speculation(), _STREAMS), file.n_tokens
        n_streams, questions = min(_STREAMS, engine.max_concurrency), file.list_unanswered(config.questions)
        n_left = max(0, 2 * _LEAST - n_before)
        try:
            for each in write_conversations(engine, questions, file.next_seed, n_streams):
                if each is not None:
                    file.add(each)
                n, taken_s = file.n_tokens, allowance.clock() - began_s
                if not is_told and n - n_before > _RATED:
                    is_told = True
                    told = _describe_writing(n_left, n_left * taken_s / (n - n_before), allowance.limit_s)
                    if told:
                        notice(told)
                share = max(n / config.n_tokens, min(taken_s / limit_s, n / (2 * _LEAST)))
                self.reporter.writing(min(share, 1.0), n)
                if share >= 1:
                    break
                if throttle.must_stop():
                    raise stopped_on_battery(f"the writing stopped after {n:,} tokens")
                if allowance.left_s <= 0:
                    raise time_is_up(f"{n:,} of the {2 * _LEAST:,} tokens that are needed are written")
        finally:
            engine.release_draft()


def _keep_time(trainee: Trainee, allowance: Allowance, n_measured: int) -> Trainee:
    """The same with as many held-out texts as time is kept for; they are measured `n_measured` times, once after the
    training. Raises InvalidRequest if no time is left to train in.
    """
    trainee, allowance.reserve_s = trainee.fit(_MEASURING * allowance.limit_s, allowance.clock)
    whole_s = n_measured * allowance.reserve_s
    if allowance.left_s + allowance.reserve_s > whole_s:
        return trainee
    needed = int(whole_s / 60 / (1 - _WRITING - _READING)) + 1
    reached = f"measuring the head takes about {whole_s / 60:.1f} minutes"
    if needed * 60 > allowance.limit_s:
        raise time_is_up(reached, f"with --minutes {needed} or more")
    raise time_is_up(f"{reached}, and what came before has left less")


def _describe_writing(n_left: int, seconds: float, limit_s: float) -> str:
    """What it means for a run of `limit_s` that writing the texts that are left takes `seconds`; "" if nothing."""
    needed = f"the {n_left:,} tokens that are still needed take about {max(1, round(seconds / 60))} minutes to write"
    if seconds > limit_s:
        return f"The time is too short: {needed}. The same command goes on."
    if seconds > _MUCH * limit_s:
        return f"Most of the time is needed for writing: {needed}. The same command trains further."
    return ""


def _check_tokens(n: int) -> None:
    """Raise InvalidRequest if `n` tokens of answers leave too few to train on."""
    if n * (_EACH - 1) < _LEAST * _EACH:
        raise InvalidRequest(
            f"{n:,} tokens of answers are too few: {_LEAST:,} to train on are needed, and a fifth of all is held out.",
            hint=f"Use --tokens {_LEAST * _EACH // (_EACH - 1)} or more.",
        )


def prepare_first(materials: Materials, path: Path) -> None:
    """Write a head that was never trained, unless an earlier run has left one that is whole."""
    from edgespec.train.head_files import choose_vocabulary, write_new_head

    with suppress(InvalidModelFile):
        if path.exists():
            read_head(path)
            return
    remove_path(path)
    (materials.folder / CHECKPOINT).unlink(missing_ok=True)  # of a head with another vocabulary
    answers = (text.tokens[text.answer :] for text in materials.train)
    vocabulary = choose_vocabulary(answers, materials.target.tokenizer.vocab_size)
    write_new_head(materials.target, materials.target_path, vocabulary, path)


def split_conversations(texts: Sequence[TrainingText]) -> tuple[list[TrainingText], list[TrainingText]]:
    """(texts to train on, texts to measure with), of each prompt the last one. Raises InvalidRequest for too few."""
    unique = list({text.tokens[: text.answer].tobytes(): text for text in texts}.values())
    held_out = [text for text in unique if int(text.source.partition(":")[2]) % _EACH == 0][:_MOST]
    sources = {text.source for text in held_out}
    train = [text for text in unique if text.source not in sources]
    n = count_tokens(train)
    if n < _LEAST or len(held_out) < MIN_HELD_OUT:
        raise InvalidRequest(
            f"there are {n:,} tokens of {len(unique)} answers to train on; {_LEAST:,} and {_EACH * MIN_HELD_OUT} are"
            " needed.",
            hint="Use more --tokens or --minutes: the same command goes on.",
        )
    return train, held_out


def measure_lookups(texts: Sequence[TrainingText], depth: int) -> dict[str, Matrix]:
    """The Matrix of each conversation, for drafts by n-grams of its own text."""
    found = {}
    for text in texts:
        lookup, tokens, rounds = SuffixLookup(), text.tokens.tolist(), find_rounds(text)
        lookup.read(tokens[: rounds.start])
        hits = np.zeros((len(rounds), depth), np.float32)
        for row, position in zip(hits, rounds, strict=True):
            lookup.extend(tokens[:position])
            draft = continue_from(lookup.tokens, lookup.end, depth) if lookup.length else []
            for d, (token, true) in enumerate(zip(draft, tokens[position:], strict=False)):
                row[d] = token == true
        found[text.source] = hits
    return found
