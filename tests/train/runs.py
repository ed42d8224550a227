"""A small training run, also as a program that tests kill: `python -m tests.train.runs FOLDER`."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.errors import Cancelled
from edgespec.train.objectives import distillation
from edgespec.train.options import Progress, Throttle, TrainOptions
from edgespec.train.parts import Parts
from edgespec.train.teacher import Teacher
from edgespec.train.texts import TrainingText
from edgespec.train.trainer import Trainer

VOCABULARY = 97
_FOLDERS = tempfile.TemporaryDirectory()
FREE = Throttle(must_wait=lambda: False, must_stop=lambda: False)
OPTIONS = TrainOptions(learning_rate=3e-3, epochs=3, checkpoint_s=0.0)


def new_folder() -> Path:
    """A folder for what a target has said of texts."""
    return Path(tempfile.mkdtemp(dir=_FOLDERS.name))


class TinyDraft(nn.Module):
    """[B, T] -> [B, T, V], from the last two tokens; the first layer is frozen, and noise depends on MLX's seed."""

    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = [nn.Linear(32, 32), nn.Linear(32, 64)]
        self.head = nn.Linear(64, VOCABULARY)
        self.noise = nn.Dropout(0.1)
        self.layers[0].freeze()

    def __call__(self, tokens: mx.array) -> mx.array:
        now = self.embedding(tokens)
        before = mx.pad(now[:, :-1], [(0, 0), (1, 0), (0, 0)])
        x = mx.concatenate([before, now], axis=-1)
        for layer in self.layers:
            x = nn.silu(layer(x))
        return self.head(self.noise(x))


def make_batches(seed: int = 0, n: int = 24) -> Parts:
    """Texts read by a toy whose next token depends on the last one."""
    rule = ToyModel(seed=3, vocab_size=VOCABULARY, order=1)
    rng = np.random.default_rng(seed)
    texts = [
        TrainingText(rng.integers(0, VOCABULARY, int(rng.integers(20, 60))).astype(np.int32), 4, 8, str(i))
        for i in range(n)
    ]
    teacher = Teacher(ToySession(rule, context_size=128))
    return Parts(texts, teacher, new_folder(), batch_tokens=256, max_length=48)


def make_trainer(folder: Path, options: TrainOptions = OPTIONS, throttle: Throttle = FREE) -> tuple[TinyDraft, Trainer]:
    network = TinyDraft()
    folder.mkdir(exist_ok=True)
    return network, Trainer(network, distillation, make_batches(), options, folder, throttle)


def cancel_at(n: int) -> Throttle:
    """A throttle of a run that is cancelled before its n-th step."""
    calls = 0

    def must_wait() -> bool:
        nonlocal calls
        calls += 1
        if calls == n:
            raise Cancelled
        return False

    return replace(FREE, must_wait=must_wait)


def digest_weights(network: nn.Module) -> str:
    """A hash of every bit of them."""
    digest = hashlib.sha256()
    for path, array in tree_flatten(network.parameters()):
        digest.update(path.encode() + np.array(array).tobytes())
    return digest.hexdigest()


def train(folder: Path, report: Callable[[Progress], None]) -> str:
    network, trainer = make_trainer(folder)
    trainer.run(report)
    return digest_weights(network)


if __name__ == "__main__":
    print("weights", train(Path(sys.argv[1]), lambda progress: print("step", progress.step, flush=True)), flush=True)
