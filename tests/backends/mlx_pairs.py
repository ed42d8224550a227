"""Heads on MLX beside a session of their target: in step with it, and how much of them is accepted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import pytest

from edgespec.autopilot.fixed import FixedLength
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.mlx.session import MlxSession
from edgespec.core.arrays import Logits
from edgespec.core.drafter import Drafter
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.drafters.registry import SlotResources, drafter_specs
from edgespec.errors import EdgespecError
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from tests.backends import head_sessions
from tests.backends.assistant_heads import (
    SIZE,
    TARGET_WINDOWS,
    WIDTH,
    WINDOWS,
    describe_layers,
    make_target,
    name_tensors,
)
from tests.backends.head_sessions import Pair
from tests.contract.runtimes import prefill
from tests.mlx_models import make_folder

CHAIN = Budget(3, 3)
PROMPTS = (
    "def read_lines(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\n\n\ndef main():\n    parser = ",
    "    def close(self):\n        if self._closed:\n",
)


def make_tokens(n: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(4, 600, n).tolist()
    return found


def is_close(a: Any, b: Any) -> bool:
    return head_sessions.is_close(a, b, 5e-3)


def tapped_features(target: MlxModel, spec: HeadSpec, text: list[int]) -> Any:
    """[n - 1, width] what a head reads of the target, of all tokens of `text` but the last."""
    session = target.open_session()
    kept = session.tap(spec.layers or ())
    prefill(session, text[:-1])
    return np.array(kept.take(0, len(text) - 1)).astype(np.float64)


class Reference(Protocol):
    """The forward pass of a head over a whole text."""

    def logits(self, features: Any, tokens: list[int], drafted: list[int]) -> Logits:
        """[V] after pairs of `features` and `tokens`, and of drafted tokens with the head's own states."""


def check_forward(target: MlxModel, head: MlxHead, reference: Reference, spec: HeadSpec) -> None:
    """The head says what `reference` does, after a text and after two drafted tokens."""
    pair = Pair(target, head, make_tokens(20))
    features = tapped_features(target, spec, pair.text)
    assert is_close(pair.read(), reference.logits(features, pair.text[1:], []))
    pair.step(9)
    found = pair.step(30)
    assert is_close(found, reference.logits(features, pair.text[1:], [9, 30]))
    assert not is_close(pair.read(), found), "nothing was tested"


def read_spec(folder: Path, **changes: Any) -> HeadSpec:
    spec = read_head(folder)
    assert spec is not None
    return replace(spec, **changes)


def attach(target: MlxModel, folder: Path, **changes: Any) -> MlxHead:
    """The head in a folder, with some of its description changed."""
    return target.load_head(read_spec(folder, **changes), folder)


def refuse(
    target: MlxModel,
    folder: Path,
    error: type[EdgespecError] | tuple[type[EdgespecError], ...],
    message: str,
    **changes: Any,
) -> None:
    """A head is refused in one sentence, and the next thing to do is said."""
    with pytest.raises(error, match=message) as caught:
        attach(target, folder, **changes)
    assert "\n" not in caught.value.message
    assert caught.value.hint


@dataclass
class Answers:
    """Answers to PROMPTS, and what was accepted of their drafts.

    texts     their tokens
    tested    rounds in which a drafted token was compared, by depth from 0 on
    accepted  rounds in which it was accepted, likewise
    rounds    in all
    """

    texts: list[list[int]] = field(default_factory=list)
    tested: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    rounds: int = 0

    @property
    def rate(self) -> float:
        """The share of compared tokens that was accepted."""
        return self.accepted.total() / self.tested.total()

    @property
    def by_depth(self) -> list[float]:
        """Likewise at each depth."""
        return [self.accepted[depth] / self.tested[depth] for depth in sorted(self.tested)]

    @property
    def tokens_per_round(self) -> float:
        return (self.rounds + self.accepted.total()) / self.rounds

    def add(self, events: Iterable[object]) -> None:
        """The events of one answer."""
        self.texts.append([])
        for event in events:
            if isinstance(event, Step):
                self.texts[-1] += event.tokens
                self.tested.update(range(event.n_tested))
                self.accepted.update(range(event.n_accepted))
                self.rounds += event.index > 0


def answer(
    target: MlxModel,
    head: MlxHead | None,
    *,
    budget: Budget = CHAIN,
    temperature: float = 0.0,
    prompts: Sequence[str] = PROMPTS,
) -> Answers:
    """Answers to prompts, with the drafts of a head or without."""
    found = Answers()
    for prompt in prompts:
        session = target.open_session()
        drafters = [] if head is None else [open_drafter(head, session)]
        controller = FixedLength(drafters, budget if drafters else Budget(0, 0), target.tokenizer.vocab_size)
        verifier = SampleMatching(Sampler(SamplingParams(temperature=temperature), []), CounterRng(7))
        tokens = target.tokenizer.encode(prompt, parse_special=False)
        found.add(speculate(session, controller, verifier, tokens, max_tokens=40, stop=frozenset()))
        assert not controller.failures
        for drafter in drafters:
            drafter.close()
        session.close()
    return found


def open_drafter(head: MlxHead, session: MlxSession) -> Drafter:
    """The registry's drafter for a head's kind."""
    opened = head.open_session(session)
    resources = SlotResources(session, session.capabilities.vocab_size, head=opened)
    return drafter_specs()[head.name].open(resources)


class LateFeatures:
    """Features of which each row but the first is that of the position before."""

    def __init__(self, features: Any) -> None:
        self._features = features

    def __getattr__(self, name: str) -> Any:
        return getattr(self._features, name)

    def take(self, first: int, last: int) -> Any:
        rows = self._features.take(max(first - 1, 0), last)
        return rows[:-1] if first else mx.concatenate([rows[:1], rows[:-1]])

    def release(self, position: int) -> None:
        """Keep all."""


def write_assistant(path: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """A Gemma 4 assistant of these weights in a folder."""
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), {name: mx.array(each) for name, each in tensors.items()})
    layers = {**describe_layers(WINDOWS, SIZE), **config}
    whole = {"model_type": "gemma4_assistant", "backbone_hidden_size": WIDTH, "text_config": layers}
    (path / "config.json").write_text(json.dumps(whole))
    return path


def make_assistant_target(folder: Path) -> None:
    """A Gemma 4 model in folder `target`, and a GGUF file of the same weights."""
    make_folder(folder / "target", describe_layers(TARGET_WINDOWS, WIDTH))
    tensors = name_tensors(make_target(folder / "target.gguf"))
    weights = {name: mx.array(each) for name, each in tensors.items()}
    mx.save_safetensors(str(folder / "target" / "model.safetensors"), weights)
