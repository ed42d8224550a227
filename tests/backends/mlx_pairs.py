"""Heads on MLX beside a session of their target: in step with it, and how much of them is accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.mlx.head_session import HeadSession
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.mlx.session import MlxSession
from edgespec.controller.fixed import FixedLength
from edgespec.core.drafter import BlockSession, Drafter
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, CheckCancelled, Draft, Step
from edgespec.core.sampling import CounterRng, Logits, Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.drafters import SlotResources, drafter_specs
from edgespec.errors import Cancelled, EdgespecError
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from tests.backends import head_sessions
from tests.backends.head_sessions import WHOLE, Cancellation, Pair, check_fresh
from tests.contract.runtimes import prefill

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
    return head_sessions.is_close(a, b, Pair.tolerance)


def count_pending(pair: Pair, missing: int) -> int:
    """Tokens that the head has to read where `missing` rows of the text are not held."""
    network = pair.head.network  # type: ignore[attr-defined]
    if not network.depth:  # which reads the last state alone
        return 1
    return max(1, missing) if network.reads_pairs else missing + 1


def check_rollout(pair: Pair, n: int, length: int) -> Draft:
    """A rollout of `n` tokens is the chain of best tokens, `length` tokens long. Returns it."""
    rows = pair.follow(length)
    chain, scores = pair.rollout(n)
    assert chain.tokens.tolist() == rows.argmax(axis=1).tolist()
    assert is_close([scores.logits(i) for i in range(length)], rows)
    return chain


def follow_another_text(target: MlxModel, head: MlxHead, shared: int) -> Pair:
    """A pair that has drafted, and whose new text begins with the first `shared` tokens of the last one."""
    text = make_tokens(30)
    pair = Pair(target, head, text)
    pair.say()
    pair.restart([*text[:shared], *make_tokens(25, seed=shared + 1)])
    return pair


def check_window(target: MlxModel, head: MlxHead) -> None:
    """A window reads the end of the text alone."""
    text = make_tokens(60)
    pair, short = Pair(target, head, text), Pair(target, head, text)

    def first(each: Pair, window: int = WHOLE) -> np.ndarray:
        """[1, V] of a head that steps, all rows of a block."""
        return each.block(window) if isinstance(each.draft, BlockSession) else each.read(window)[None]

    whole = first(pair)
    assert not is_close(first(short, 10), whole)
    assert short.draft.pending_tokens(text) == 1
    assert is_close(first(short), first(Pair(target, head, text), 10))
    short.restart([*text[:20], *make_tokens(9, seed=5)])  # behind what was read: only what the target ran anew is read
    found = first(short)
    np.testing.assert_array_equal(np.isneginf(found[0]), np.isneginf(whole[0]))
    assert not np.isnan(found).any()
    pair.verify_chain([4], 1, 9)
    check_fresh(pair)


def cancel_a_read(target: MlxModel, head: MlxHead) -> Pair:
    """A pair whose read was cancelled after some of its chunks."""
    check = Cancellation()
    pair = Pair(target, head, make_tokens(40), check)
    check.left = 3
    with pytest.raises(Cancelled):
        pair.say()
    assert 1 < pair.draft.pending_tokens(pair.text) < 39
    return pair


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


def measure(
    target: MlxModel, head: MlxHead, plain: Answers, budget: Budget = CHAIN, n_prompts: int = len(PROMPTS)
) -> float:
    """The share of compared tokens that was accepted. Answers must be those of plain decoding."""
    found = answer(target, head, budget=budget, prompts=PROMPTS[:n_prompts])
    assert found.texts == plain.texts[:n_prompts]
    return found.rate


def check_trees(target: MlxModel, head: MlxHead, plain: Answers) -> None:
    """Trees accept more than chains. Answers are those of plain decoding, drawn ones too."""
    tree, chain = (answer(target, head, budget=budget, prompts=PROMPTS[:2]) for budget in (Budget(3, 8), CHAIN))
    assert tree.texts == chain.texts == plain.texts[:2]
    assert tree.tokens_per_round > chain.tokens_per_round
    drawn = [answer(target, each, temperature=0.8, prompts=PROMPTS[:1]) for each in (head, None)]
    assert drawn[0].texts == drawn[1].texts


def open_drafter(head: MlxHead, session: MlxSession) -> Drafter:
    """The registry's drafter for a head's kind."""
    opened = head.open_session(session, lambda: None)
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


def open_late(network: Any, target: MlxSession, features: Any, check: CheckCancelled) -> HeadSession:
    """A session whose features are shifted by one position."""
    late: Any = LateFeatures(features)
    return HeadSession(network, target, late, check)
