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
from math import prod
from pathlib import Path
from time import time
from typing import Any, Protocol

from edgespec.adapt.evaluate import Return, compare, expected_tokens, require_positions, return_to_best
from edgespec.adapt.options import Progress, StopReason, Throttle, TrainOptions, Weights
from edgespec.adapt.recipes import BATCH_TOKENS, RANK, TRAINED, Materials, Trainee, measure_draft, open_trainee
from edgespec.adapt.texts import ALL_TEXTS, Split, TextSelection, TrainingText, count_tokens, read_texts, take_latest
from edgespec.backends import open_model
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import CacheError, DoesNotFit, DraftRefused, InvalidRequest, reason_of
from edgespec.files import lock_file, write_private
from edgespec.formats.gguf_validate import read_file, read_gguf_config
from edgespec.formats.head_file import read_folder_shapes
from edgespec.formats.heads import unpack_shapes
from edgespec.formats.mlx_folder import read_folder
from edgespec.hub.hub import Hub
from edgespec.memory.store import TextStore
from edgespec.planner.draft_finder import PlannedDrafter, PlannedModel
from edgespec.planner.plan import LoadConfig, Plan, Reporter, fetch, open_vocabulary, plan
from edgespec.registry.adapted import AdaptedDrafts, Card, Gain
from edgespec.registry.schema import Registry
from edgespec.registry.tokenizer_compat import identify_tokenizer
from edgespec.units import gib

# The folder of a training run that is not complete: the same command goes on with it.


_STATE, _LOCK = "run.json", "lock"


@contextmanager
def open_run(folder: Path, options: str) -> Iterator[float]:
    """Yield when the run began, in seconds since the epoch: earlier than now for one with these options that goes on.

    The checkpoints of a run with other options are removed. The folder is removed when the block ends without an error,
    or with one before anything was kept in it: the next run then takes later texts too.

    Raises InvalidRequest where another process runs it, CacheError.
    """
    with ExitStack() as opened:
        try:
            for each in (folder.parent.parent, folder.parent, folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened.enter_context(lock_file(folder / _LOCK, wait=False))
            began_s = _read_start(folder / _STATE, options) or _start_anew(folder, options)
        except BlockingIOError:
            raise InvalidRequest("this draft is being trained already.", hint="Wait until that has ended.") from None
        except OSError as error:
            raise CacheError(
                f"{folder} cannot be written: {reason_of(error)}.", hint="Check its permissions, or free some space."
            ) from error
        try:
            yield began_s
        except BaseException:
            if not {path.name for path in folder.glob("*")} - {_STATE, _LOCK}:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _start_anew(folder: Path, options: str) -> float:
    """Remove what another run has left, and remember when this one begins; returns that. Raises OSError."""
    for path in folder.iterdir():
        if path.name != _LOCK:
            path.unlink()
    began_s = time()
    write_private(folder / _STATE, json.dumps({"began_s": began_s, "options": options}))
    return began_s


def _read_start(state: Path, options: str) -> float | None:
    """When the run in a folder began; None where there is none with these options."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(state.read_text(encoding="utf-8"))
        if found["options"] == options:
            return float(found["began_s"])
    return None


# Memory that training a draft model needs, estimated from its header; neither weights nor MLX are loaded.


_FLOAT_BYTES = 4
_MOMENTS = 2  # AdamW's, of each trained weight
_IN_STEP = 3  # for each trained weight: its gradient, before and after clipping, and its update
_SEQUENCE = 512  # tokens; texts are cut into parts of at most so many
# Single-precision numbers that a layer keeps for the backward pass, for each token. Fitted to MLX's peaks.
_PER_HIDDEN, _PER_FEED_FORWARD, _PER_HEAD_PAIR = 9, 5, 1.5
_PER_LOGIT = 4
_MARGIN = 1.1


def estimate_training_bytes(path: Path, batch_tokens: int, *, rank: int | None = None) -> int:
    """Bytes to train a draft model with AdamW on batches of so many tokens, in parts of 512 tokens at most.

    rank  of LoRA; None to train all weights

    Raises InvalidModelFile, CacheError.
    """
    sizes, shapes = _read_sizes(path)
    n_weights = sum(prod(shape) for shape in shapes.values())
    n_trained = n_weights
    if rank is not None:
        blocks = [shape for name, shape in shapes.items() if len(shape) == 2 and (".layers." in name or "blk." in name)]
        n_trained = sum(rank * sum(shape) for shape in blocks)
        n_weights += n_trained
    in_layer = (
        _PER_HIDDEN * sizes["hidden_size"]
        + _PER_FEED_FORWARD * sizes["intermediate_size"]
        + _PER_HEAD_PAIR * sizes["num_attention_heads"] * min(batch_tokens, _SEQUENCE)
    )
    per_token = sizes["num_hidden_layers"] * in_layer + _PER_LOGIT * sizes["vocab_size"]
    in_step = max(per_token * batch_tokens, _IN_STEP * n_trained)
    return int(_MARGIN * _FLOAT_BYTES * (n_weights + _MOMENTS * n_trained + in_step))


def _read_sizes(path: Path) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """(sizes by their names in config.json, shapes of the tensors) of a GGUF file or folder."""
    if not path.is_dir():
        header = read_file(path)
        return read_gguf_config(header), {tensor.name: tensor.shape for tensor in header.tensors}
    folder = read_folder(path)
    shapes = unpack_shapes(folder.config, read_folder_shapes(path))
    defaults = {"hidden_size": 0, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 0}
    sizes = {key: folder.integer(key) or default for key, default in defaults.items()}
    sizes["intermediate_size"] = folder.integer("intermediate_size") or 4 * sizes["hidden_size"]
    return sizes, {name: shape for name, shape in shapes.items() if not name.endswith((".scales", ".biases"))}


_MAX_HELD_OUT = 50_000  # tokens: enough for intervals of a few percent, and no long wait
_LORA_ABOVE = 2**30  # bytes that training all weights takes


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """What to train, and how.

    load       the target and its draft; `load.draft` names the draft, or is 'auto' for the one that is paired with it
    weights    what is trained: all, or LoRA; None: all where that takes less than 1 GiB
    documents  whether to learn from added documents too
    texts      which texts are trained on, and from which version on
    """

    load: LoadConfig
    weights: Weights | None = None
    train: TrainOptions = field(default_factory=TrainOptions)
    documents: bool = True
    throttle: Throttle = field(default_factory=Throttle)
    texts: TextSelection = ALL_TEXTS


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


@dataclass(frozen=True, slots=True)
class Adapter:
    """Runs adaptations with the models, texts and versions of this machine.

    texts     the folder of the memory
    reporter  is called on the thread of `run`
    """

    registry: Registry
    hub: Hub
    texts: Path
    drafts: AdaptedDrafts
    reporter: AdaptReporter
    check: CheckCancelled

    def run(self, config: AdaptConfig) -> Adaptation:
        """Train the draft, and keep it if it gains. A run that was stopped or killed goes on.

        Texts and memory are known to suffice before weights are loaded. Raises EdgespecError, Cancelled.
        """
        planned = plan(replace(config.load, memory=None, adapted=None), self.registry, self.hub, self.reporter)
        drafter, model = _find_draft(planned)
        target_path, base_path = (
            fetch(source, self.hub, self.reporter, self.check) for source in (planned.target, model.source)
        )
        pair = self.drafts.pair(target_path, base_path)
        check = partial(config.throttle.wait, self.check)  # what is read and measured waits for engines too
        returned = None
        if config.texts.from_best:
            split = cache(lambda: self._read_split(config, time()))  # read when the first draft is measured
            returned = return_to_best(
                pair,
                base_path,
                lambda path: measure_draft(drafter, path, take_latest(split().held_out, _MAX_HELD_OUT), check),
            )
        active = pair.active()
        start = base_path if active is None else active.path
        weights = config.weights or _choose_weights(drafter, start)
        folder = pair.folder / config.texts.folder
        options = json.dumps([weights, config.documents, pair.active_number(), asdict(config.train)])
        with open_run(folder, options) as began_s, ExitStack() as opened:
            texts = self._read_split(config, began_s)
            _check_memory(planned, drafter, start, weights)
            progress = partial(self.reporter.loading, target_path.name)
            target = open_model(planned.backend, target_path, planned.options, progress=progress, check=self.check)
            opened.callback(target.close)
            materials = Materials(
                target=target,
                load=planned.options,
                train=texts.train,
                held_out=take_latest(texts.held_out, _MAX_HELD_OUT),
                options=config.train,
                throttle=config.throttle,
                folder=folder,
                check=check,
                reading=self.reporter.reading,
            )
            trainee = open_trainee(drafter, start, weights, materials, opened)
            result, gain = self._train(trainee)
            card = None
            if gain.is_better:
                named = Card(
                    **_describe_texts(texts.train),
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

    def _read_split(self, config: AdaptConfig, began_s: float) -> Split:
        """The texts that were stored before the run began. Raises InvalidRequest for too few."""
        with open_vocabulary(config.load, self.registry, self.hub) as tokenizer:
            identity = identify_tokenizer(tokenizer)
        texts: list[TrainingText] = []
        if self.texts.is_dir():
            with closing(TextStore.open(self.texts)) as store:
                texts = read_texts(store, identity, documents=config.documents)
        return config.texts.split([text for text in texts if text.time <= began_s])

    def _train(self, trainee: Trainee) -> tuple[Progress, Gain]:
        """Train, and measure before and after. Raises InvalidRequest on battery, and for answers of one token."""

        def report(progress: Progress) -> None:
            tokens = expected_tokens(trainee.measure().values()) if progress.is_epoch else None
            self.reporter.training(progress.step, progress.n_steps, progress.loss, tokens)

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


def _describe_texts(texts: Sequence[TrainingText]) -> dict[str, Any]:
    """The fields of a card about what was trained on."""
    times = [text.time for text in texts]
    return {
        "n_texts": len(texts), "n_tokens": count_tokens(texts), "first_s": min(times), "last_s": max(times)
    }  # fmt: skip
