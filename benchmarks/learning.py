"""Learning while answering: tokens of a round over the conversations of a memory, with what is learned so far.

    uv run python -m benchmarks.learning --memory FOLDER [--target T.gguf] [--draft D.gguf] [--block 100] \
        [--epochs 3] [--learning-rate 1e-4] [--threads 1]

The conversations come in blocks, in the order of storing. Each block is measured with the draft as it was at first and
with the version in use. Then the draft is trained on the newest texts so far, as `--learn` does it, and the version is
kept if it predicts the newest conversations better. Tokens of a round are those of chains of 4 drafted tokens; the gain
has a 95% interval. "cpu_s" is the processor time of training and comparing. The target reads each text once here;
"reading_cpu_s" is the time that it would take to read the texts of each training again, as `--learn` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

import click

from benchmarks.harness import DRAFT, MODEL_PATH, TARGET, load_model, print_result
from edgespec.backends.options import LoadOptions
from edgespec.core.arrays import Ints
from edgespec.core.protocols import Session
from edgespec.errors import InvalidRequest
from edgespec.memory.administration import TextStore
from edgespec.models.tokenizer_compat import identify_tokenizer
from edgespec.models.versions import AdaptedDrafts, AdaptedPair, Card
from edgespec.train.evaluate import Matrix, compare, measure_chains, return_to_best
from edgespec.train.objectives import distillation
from edgespec.train.options import Throttle, TrainOptions
from edgespec.train.parts import Parts
from edgespec.train.student import Student
from edgespec.train.teacher import Part, Teacher
from edgespec.train.texts import TrainingText, read_texts, split_texts
from edgespec.train.trainer import Trainer

DEPTH = 4
_UNHURRIED = Throttle(must_wait=lambda: False, must_stop=lambda: False)


class Reader(Teacher):
    """A target that reads each window once, with the processor time that this took."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._parts: dict[tuple[bytes, int], Part] = {}
        self.seconds, self.n_tokens = 0.0, 0

    def read(self, tokens: Ints, first: int = 0) -> Part:
        key = tokens.tobytes(), first
        if key not in self._parts:
            began_s = process_time()
            self._parts[key] = super().read(tokens, first)
            self.seconds += process_time() - began_s
            self.n_tokens += len(tokens)
        return self._parts[key]


@dataclass
class Learner:
    """The versions of a draft, trained now and then; `n_read` tokens are those that trainings have read."""

    pair: AdaptedPair
    base: Path
    reader: Reader
    options: TrainOptions
    cpu_s: float = 0.0
    n_read: int = 0
    events: list[str] = field(default_factory=list)

    def measure(self, path: Path, texts: Sequence[TrainingText]) -> dict[str, Matrix]:
        return measure_chains(Student.open(path).network, texts, DEPTH)

    @property
    def path(self) -> Path:
        """The draft in use."""
        active = self.pair.active()
        return self.base if active is None else active.path

    def learn(self, texts: Sequence[TrainingText]) -> None:
        """Return to a better version, train, and keep the result where it gains. Too few texts are passed over."""
        try:
            train, held_out = split_texts(texts, newest=True)
        except InvalidRequest as refusal:
            self.events.append(refusal.message)
            return
        began_s = process_time()
        found = return_to_best(self.pair, self.base, lambda path: self.measure(path, held_out))
        self.events.append("" if found is None else f"back to {found.version}; ")
        student = Student.open(self.path)
        before = measure_chains(student.network, held_out, DEPTH)
        student.train_all()
        with tempfile.TemporaryDirectory() as folder:
            parts = Parts(train, self.reader, Path(folder))
            self.n_read += sum(window.stop - window.start for window in parts.windows)
            read_s = process_time()
            parts.fill(lambda done, total: None)
            began_s += process_time() - read_s
            trainer = Trainer(student.network, distillation, parts, self.options, Path(folder), _UNHURRIED)
            result = trainer.run(lambda progress: None)
        gain = compare(before, measure_chains(student.network, held_out, DEPTH))
        if gain.is_better:
            card = Card("model", "", "", 0, gain, result.seconds / 60)
            self.events[-1] += f"version {self.pair.add(card, student.save).version}"
        self.cpu_s += process_time() - began_s


@click.command(help=__doc__)
@click.option("--memory", type=MODEL_PATH, required=True)
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
@click.option("--block", type=click.IntRange(1), default=100)
@click.option("--epochs", type=click.IntRange(1), default=TrainOptions().epochs)
@click.option("--learning-rate", type=float, default=TrainOptions().learning_rate)
@click.option("--threads", type=int, default=1)
def main(memory: Path, target: Path, draft: Path, block: int, epochs: int, learning_rate: float, threads: int) -> None:
    model = load_model("llamacpp", target, LoadOptions(threads=threads))
    with closing(TextStore.open(memory)) as store:
        texts = read_texts(store, identify_tokenizer(model.tokenizer), documents=False)
    sources = list(dict.fromkeys(text.source for text in texts))
    options = TrainOptions(epochs=epochs, learning_rate=learning_rate)
    with tempfile.TemporaryDirectory() as folder, closing(model.open_session()) as session:
        pair = AdaptedDrafts(Path(folder)).pair(target, draft)
        learner = Learner(pair, draft, Reader(session), options)
        rows: list[dict[str, Any]] = []
        for start in range(0, len(sources), block):
            known, new = set(sources[: start + block]), set(sources[start : start + block])
            ahead = [text for text in texts if text.source in new]
            gain = compare(learner.measure(draft, ahead), learner.measure(learner.path, ahead))
            rows.append({"first": start, "version": pair.active_number(), **asdict(gain)})
            click.echo(
                f"{start:6} version {rows[-1]['version']:2}  {gain.before:.3f} {gain.after:.3f}"
                f"  {gain.low:+.3f} to {gain.high:+.3f}",
                err=True,
            )
            learner.learn([text for text in texts if text.source in known])
            rows[-1]["then"] = learner.events[-1]
    reading_s = learner.reader.seconds / max(learner.reader.n_tokens, 1) * learner.n_read
    times = {"cpu_s": learner.cpu_s, "reading_cpu_s": reading_s}
    print_result("learning", {"block": block, "epochs": epochs, "blocks": rows, **times}, target, draft)


if __name__ == "__main__":
    main()
