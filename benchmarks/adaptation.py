"""What training a draft on stored texts gains: how much of texts that are held out it predicts, before and after.

    uv run python -m benchmarks.adaptation ~/.local/share/edgespec/memory [--size 10000 --size 100000] \
        [--weights full --weights lora] [--learning-rate 1e-4] [--epochs 3] [--target T.gguf] [--draft D.gguf] \
        [--save FOLDER]

The texts are those of a memory's folder in the target's vocabulary. They are split by conversation as `edgespec adapt`
splits them. A run trains on the newest tokens. It is measured on the newest conversations that are held out, the same
for all runs. A token is accepted where the draft's best one is the text's. "alpha" is the share that is accepted at a
depth where all before it were. "tokens" are those of a round at a length, with the gain and its 95% interval by a
bootstrap over conversations. "fresh" counts the positions whose last 8 tokens did not occur before in their
conversation: models repeat themselves, and repeats are easy. "cpu_s" and "minutes" are those of the training; the
teacher's reading is told apart. "peak_mib" is the most memory of the process so far. stdout ends with one JSON line.
"""

from __future__ import annotations

import itertools
import resource
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any, Literal

import click
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from benchmarks.harness import DRAFT, MODEL_PATH, TARGET, load_model, print_result
from benchmarks.learning import Reader
from edgespec.backends.options import LoadOptions
from edgespec.memory.administration import TextStore
from edgespec.models.tokenizer_compat import identify_tokenizer
from edgespec.train.evaluate import Matrix, chain_matrix, compare, find_hits, find_rounds, read_best
from edgespec.train.objectives import distillation
from edgespec.train.options import WEIGHTS, Throttle, TrainOptions
from edgespec.train.parts import Parts
from edgespec.train.student import Student
from edgespec.train.teacher import Teacher
from edgespec.train.texts import TrainingText, count_tokens, read_texts, split_texts
from edgespec.train.trainee import RANK
from edgespec.train.trainer import Trainer

DEPTH = 7
CONTEXT = 8  # tokens that make a position fresh where they are new
FREE = Throttle(must_wait=lambda: False, must_stop=lambda: False)
_CONTEXT_SIZE = 2048
_RESAMPLES = 2000

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Run:
    """One training: its texts and options."""

    size: int
    weights: Literal["full", "lora"]
    options: TrainOptions

    @property
    def name(self) -> str:
        return f"{self.size}-{self.weights}-{self.options.learning_rate:g}"


class HeldOut:
    """Texts to measure drafts with."""

    def __init__(self, texts: Sequence[TrainingText]) -> None:
        self._texts = texts
        self._sources = [text.source for text in texts]
        self._fresh = find_fresh(texts)

    def read(self, network: Any) -> list[Bools]:
        """By text: [positions] whether the network's best token is the text's."""
        bests = read_best(network, self._texts)
        return [find_hits(best, text) for best, text in zip(bests, self._texts, strict=True)]

    def compare(self, before: Sequence[Bools], after: Sequence[Bools]) -> dict[str, Any]:
        """The figures of both, and the gain of the second."""
        gains = [compare(self._matrices(before, n), self._matrices(after, n)) for n in range(1, DEPTH + 1)]
        return {
            "alpha": {"before": measure_alpha(before), "after": measure_alpha(after)},
            "tokens": {
                "before": [round(gain.before, 3) for gain in gains],
                "after": [round(gain.after, 3) for gain in gains],
                "gain_95": [[round(gain.low, 3), round(gain.high, 3)] for gain in gains],
            },
            "fresh": self._compare_fresh(before, after),
            "conversations": gains[0].n_conversations,
            "positions": sum(map(len, before)),
        }

    def _matrices(self, hits: Sequence[Bools], depth: int) -> dict[str, Matrix]:
        found: dict[str, list[Matrix]] = {}
        for source, each in zip(self._sources, hits, strict=True):
            found.setdefault(source, []).append(chain_matrix(each, depth))
        return {source: np.concatenate(parts) for source, parts in found.items()}

    def _compare_fresh(self, before: Sequence[Bools], after: Sequence[Bools]) -> dict[str, Any]:
        """Acceptance of the first token at fresh positions."""
        counts: dict[str, npt.NDArray[np.float64]] = {}
        for source, fresh, *hits in zip(self._sources, self._fresh, before, after, strict=True):
            row = counts.setdefault(source, np.zeros(3))
            row += [fresh.sum(), *(each[fresh].sum() for each in hits)]
        table = np.array(list(counts.values()))
        n, first, second = table.sum(0)
        drawn = np.random.default_rng(0).multinomial(len(table), np.full(len(table), 1 / len(table)), _RESAMPLES)
        sums = drawn @ table
        low, high = np.percentile((sums[:, 2] - sums[:, 1]) / np.maximum(sums[:, 0], 1), (2.5, 97.5))
        return {
            "share": round(float(n) / sum(map(len, before)), 3),
            "before": round(float(first / n), 4) if n else None,
            "after": round(float(second / n), 4) if n else None,
            "gain_95": [round(float(low), 4), round(float(high), 4)],
        }


def measure_alpha(hits: Sequence[Bools]) -> list[float | None]:
    """[DEPTH] the share of tokens that are accepted where all before them were; None where there is none."""
    tried, right = np.zeros(DEPTH), np.zeros(DEPTH)
    for each in hits:
        alive = np.ones(len(each), bool)
        for depth in range(min(DEPTH, len(each))):
            alive = alive[: len(each) - depth]
            tried[depth] += alive.sum()
            alive = alive & each[depth:]
            right[depth] += alive.sum()
    return [round(float(a / b), 4) if b else None for a, b in zip(right, tried, strict=True)]


def find_fresh(texts: Sequence[TrainingText]) -> list[Bools]:
    """By text: [positions] whether the tokens before did not occur earlier in the conversation."""
    seen: dict[str, set[bytes]] = {}
    found = []
    for text in texts:
        known = seen.setdefault(text.source, set())
        fresh = np.ones(len(text.tokens), bool)
        for at in range(max(text.n_lead, CONTEXT), len(text.tokens)):
            before = text.tokens[at - CONTEXT : at].tobytes()
            fresh[at] = before not in known
            known.add(before)
        rounds = find_rounds(text)
        found.append(fresh[rounds.start : rounds.stop])
    return found


def take_newest(texts: Sequence[TrainingText], n_tokens: int) -> list[TrainingText]:
    """The last texts, with `n_tokens` in all or somewhat more."""
    sizes = np.cumsum([text.n_new for text in reversed(texts)])
    n = int(np.searchsorted(sizes, n_tokens)) + 1
    return list(texts[-n:])


def train(run: Run, draft: Path, teacher: Teacher, texts: Sequence[TrainingText]) -> tuple[Student, dict[str, Any]]:
    """Train a copy of `draft` on `texts`."""
    mx.random.seed(run.options.seed)
    student = Student.open(draft)
    if run.weights == "lora":
        student.train_lora(RANK)
    else:
        student.train_all()
    start_s = process_time()
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(texts, teacher, Path(folder), seed=run.options.seed)
        result = Trainer(student.network, distillation, parts, run.options, Path(folder), FREE).run(
            lambda progress: None
        )
    student.network.eval()
    return student, {
        "tokens_trained": count_tokens(texts),
        "steps": result.step,
        "loss": round(result.loss, 4),
        "minutes": round(result.seconds / 60, 2),
        "cpu_s": round(process_time() - start_s, 1),
        "peak_mib": read_peak(),
    }


def read_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return round(peak / 2**20)


@click.command()
@click.argument("memory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
@click.option("--size", "sizes", type=click.IntRange(1), multiple=True, default=(100_000,), help="Tokens to train on.")
@click.option("--weights", type=click.Choice(WEIGHTS), multiple=True, default=("full",))
@click.option("--learning-rate", "rates", type=float, multiple=True, default=(TrainOptions().learning_rate,))
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--held-out", type=click.IntRange(1), default=50_000, show_default=True, help="Tokens to measure with.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of the target.")
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Keep the trained drafts here.")
def main(
    memory: Path,
    target: Path,
    draft: Path,
    sizes: Sequence[int],
    weights: Sequence[Literal["full", "lora"]],
    rates: Sequence[float],
    epochs: int,
    held_out: int,
    threads: int,
    save: Path | None,
) -> None:
    """Measure the gain of a draft that is trained on the texts in the folder MEMORY."""
    model = load_model("llamacpp", target, LoadOptions(threads=threads, context_size=_CONTEXT_SIZE))
    with closing(TextStore.open(memory)) as store:
        kept = read_texts(store, identify_tokenizer(model.tokenizer), documents=True)
    train_texts, held_out_texts = split_texts(kept)
    measured = HeldOut(take_newest(held_out_texts, held_out))
    texts = take_newest(train_texts, max(sizes))
    before = measured.read(Student.open(draft).network)
    results = []
    with closing(model.open_session()) as session:
        reader = Reader(session)
        with tempfile.TemporaryDirectory() as folder:
            Parts(texts, reader, Path(folder)).fill(lambda done, total: None)
        for size, weight, rate in itertools.product(sizes, weights, rates):
            run = Run(size, weight, TrainOptions(learning_rate=rate, epochs=epochs))
            newest = take_newest(train_texts, size)
            student, found = train(run, draft, reader, newest[::-1])
            if save is not None:
                save.mkdir(parents=True, exist_ok=True)
                student.save(save / (f"{run.name}" + draft.suffix))
            figures = measured.compare(before, measured.read(student.network))
            results.append({"run": run.name, **found, **figures})
            click.echo(str(results[-1]), err=True)
    facts = {"teacher_cpu_s": round(reader.seconds, 1), "teacher_tokens": reader.n_tokens, "epochs": epochs}
    print_result("adaptation", {**facts, "runs": results}, target, draft)


if __name__ == "__main__":
    main()
