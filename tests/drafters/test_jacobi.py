"""Jacobi iterations: the target improves guesses, a pool repeats what it has said, and free rows are filled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.backends.toy import ToyModel, ToySession
from edgespec.controller.adaptive import Adaptive
from edgespec.controller.cost_model import CostModel, Profile
from edgespec.controller.stats import DraftStats
from edgespec.core.drafter import Outcome, TokenDraw
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Draft, Round, Step
from edgespec.core.sampling import CounterRng, Sampler, SamplingParams
from edgespec.core.scores import HostScores
from edgespec.core.tree import DraftTree
from edgespec.core.verify import SampleMatching
from edgespec.drafters.jacobi import _WINDOW, JacobiDrafter
from edgespec.drafters.ngram import NgramDrafter

V = 16
PROMPT = [3, 1, 4, 1, 5]


class Fixed(CostModel):
    """Costs that no measurement changes."""

    def observe(self, rows: int, position: int, seconds: float) -> None:
        super().observe(rows, position, self.profile.seconds(rows))


def run(profile: Profile, order: int, n: int = 160) -> tuple[list[int], list[Step]]:
    """(tokens, rounds) of greedy toy decoding where forwards take what `profile` says."""
    model = ToyModel(vocab_size=V, order=order)
    stats = DraftStats(profile)
    stats.costs = Fixed(profile)
    controller = Adaptive([JacobiDrafter()], stats, "test", V, trees=True)
    verifier = SampleMatching(Sampler(SamplingParams(temperature=0), V), CounterRng(1))
    session = ToySession(model, context_size=512)
    events = speculate(session, controller, verifier, PROMPT, max_tokens=n, stop=frozenset())
    steps = [event for event in events if isinstance(event, Step)]
    assert not controller.failures
    return [token for step in steps for token in step.tokens], steps[1:]


def decode_plainly(order: int, n: int = 160) -> list[int]:
    model, text = ToyModel(vocab_size=V, order=order), list(PROMPT)
    while len(text) < len(PROMPT) + n:
        text.append(int(model.logits(text).argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("order", [2, 3])
def test_free_rows_are_filled_and_gain(order: int) -> None:
    """Where a forward of 64 rows takes as long as one of one."""
    tokens, steps = run(Profile({1: 100.0, 64: 100.0}), order)
    assert tokens == decode_plainly(order)
    assert max(step.n_drafted for step in steps) >= _WINDOW
    assert len(tokens) - 1 > 1.5 * len(steps)


def test_rows_that_cost_are_not_filled_with_guesses() -> None:
    """Each row costs half a step: a text that never repeats is decoded plainly."""
    costs = Profile({rows: 100.0 * (1 + 0.5 * (rows - 1)) for rows in range(1, 65)})
    tokens, steps = run(costs, 200)
    assert tokens == decode_plainly(200)
    assert sum(step.n_drafted for step in steps) == 0


class Counting(JacobiDrafter):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self.calls["begin"] += 1
        super().begin(text, draw)

    def observe(self, done: Round) -> Sequence[Outcome]:
        self.calls["observe"] += 1
        return super().observe(done)


@pytest.mark.parametrize(("plain_s", "row_s", "is_asked"), [(1.0, 0.0, True), (1.0, 0.5, False), (0.001, 0.0, False)])
def test_beside_others_it_drafts_where_rows_are_cheap(plain_s: float, row_s: float, *, is_asked: bool) -> None:
    """Elsewhere, and where steps are short, nobody calls it; alone it is always asked."""
    costs = Profile({rows: plain_s * (1 + row_s * (rows - 1)) for rows in range(1, 17)})
    for others in ([], [NgramDrafter()]):
        drafter = Counting()
        controller = Adaptive([*others, drafter], DraftStats(costs), "test", V, trees=True)
        verifier = SampleMatching(Sampler(SamplingParams(temperature=0), V), CounterRng(1))
        [*_] = speculate(
            ToySession(ToyModel(vocab_size=V)), controller, verifier, PROMPT, max_tokens=8, stop=frozenset()
        )
        assert bool(drafter.calls) == (is_asked or not others)


def propose(drafter: JacobiDrafter, text: list[int]) -> list[list[int]]:
    """The paths to leaves."""
    tree = DraftTree()
    for _ in drafter.expand(tree, text, Budget(_WINDOW, _WINDOW)):
        pass
    return [tree.path_tokens(node) for node in range(len(tree)) if node not in tree.parents]


def rows(*best: int) -> HostScores:
    return HostScores([np.eye(V, dtype=np.float32)[token] for token in best])


def test_a_row_is_the_next_guess() -> None:
    drafter = JacobiDrafter()
    drafter.begin([1, 2, 3], None)
    assert propose(drafter, [1, 2, 3, 4]) == [[1, 2, 3]]
    done = Round([1, 2, 3, 4, 9], (9,), Draft.chain([1, 2, 3]), (), 1, rows(9, 10, 11, 12))
    assert [outcome.is_right for outcome in drafter.observe(done)] == [False]
    (guesses,) = propose(drafter, done.text)
    assert guesses[:3] == [10, 11, 12] and len(guesses) == _WINDOW, "behind the places of 1, 2 and 3"
    # 10 and 11 were right: what the row of 11 says is behind the emitted token 7, that of 12 behind its own.
    scores = rows(10, 11, 7, 8, *[0] * (_WINDOW - 3))
    done = Round([*done.text, 10, 11, 7], (10, 11, 7), Draft.chain(guesses), (0, 1), 3, scores)
    assert [outcome.is_right for outcome in drafter.observe(done)] == [True, True, False]
    assert propose(drafter, done.text)[-1][:2] == [8, 0]


def test_the_pool_repeats_what_rows_have_said() -> None:
    """Of rejected nodes too, by the two tokens before."""
    drafter = JacobiDrafter()
    drafter.begin([1, 2], None)
    drafter.observe(Round([1, 2, 3, 4], (4,), Draft.chain([1, 2]), (), 1, rows(4, 5, 6)))
    first = [(pair, propose(drafter, [9, *pair])[0][0]) for pair in ((2, 3), (3, 1), (1, 2))]
    assert first == [((2, 3), 4), ((3, 1), 5), ((1, 2), 6)]
