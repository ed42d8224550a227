"""Parts for testing the loop on the toy runtime: plain decoding without the loop, drafters that guess, alarms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from edgespec.backends.toy_session import Kind, ToyModel, ToySession
from edgespec.core.arrays import Logits, Probs
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import NO_DRAFT, Budget, Decision, Draft, Round, Step
from edgespec.core.rng import CounterRng, Rng
from edgespec.core.sampling import Distribution, Sampler, SamplingParams
from edgespec.core.weights import index_at
from edgespec.errors import Cancelled

KINDS = ("linear", "tree", "recurrent")


class Remembering(ToyModel):
    """The same logits, computed once for each context."""

    def logits(self, prefix: Sequence[int]) -> Logits:
        return _logits(self, tuple(prefix[-self.order :]))


@lru_cache(maxsize=100_000)
def _logits(model: ToyModel, context: tuple[int, ...]) -> Logits:
    return ToyModel.logits(model, context)


def open_session(kind: Kind, model: ToyModel, context_size: int = 256) -> ToySession:
    return ToySession(model, kind=kind, context_size=context_size, chunk=3)


def decode(
    model: ToyModel,
    sampler: Sampler,
    seed: int,
    prompt: Sequence[int],
    max_tokens: int,
    stop: frozenset[int],
    size: int,
) -> list[int]:
    """Plain decoding, written out: no session, no verifier, no loop."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, size + 1) and not (stop & set(tokens[len(prompt) :])):
        distribution = sampler.distribution(model.logits(tokens), tokens)
        tokens.append(distribution.token(index_at(distribution.weights, CounterRng(seed).uniform(len(tokens)))))
    return tokens[len(prompt) :]


class RememberingSampler(Sampler):
    """The same distributions, computed once for each row and window."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        super().__init__(params, vocab_size)
        self._laws: dict[tuple[bytes, tuple[int, ...]], Distribution] = {}

    def distribution(self, logits: Logits, prefix: Sequence[int]) -> Distribution:
        key = logits.tobytes(), tuple(prefix[-self.window :] if self.window else ())
        if key not in self._laws:
            self._laws[key] = super().distribution(logits, prefix)
        return self._laws[key]


class GuessingDrafter(Drafter):
    """Random chains or trees that follow `truth` (the whole text) with probability `aim` at every node.

    `eager` ignores the depth it was given. Keeps the rounds that it has observed.
    """

    def __init__(
        self,
        rng: Rng,
        vocab_size: int,
        truth: Sequence[int],
        *,
        tree: bool,
        aim: float,
        eager: bool,
        name: str = "guess",
    ) -> None:
        self.name = name
        self._rng = rng
        self._vocab_size = vocab_size
        self._truth = truth
        self._tree = tree
        self._aim = aim
        self._eager = eager
        self.begun: list[list[int]] = []
        self.observed: list[Round] = []

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self.begun.append(list(text))

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        node = -1
        for _ in range(int(self._rng.integers(0, limit.nodes + 1))):
            parent = int(self._rng.integers(-1, len(tree))) if self._tree else node
            above = [*text, *tree.path_tokens(parent)]
            if not self._eager and len(above) - len(text) >= limit.depth:
                continue
            aims = self._rng.random() < self._aim and len(above) < len(self._truth)
            token = self._truth[len(above)] if aims else int(self._rng.integers(self._vocab_size))
            node = tree.add(parent, token, self.name, float(self._rng.uniform(0.1, 1.0)))
            yield

    def observe(self, done: Round) -> Sequence[Outcome]:
        text, scores = done.text, done.scores
        assert text[len(text) - len(done.emitted) :] == list(done.emitted)
        assert [len(scores.logits(row)) for row in range(len(done.draft) + 1)] == [self._vocab_size] * (
            len(done.draft) + 1
        )
        self.observed.append(replace(done, text=tuple(text)))
        return ()


class DrawingDrafter(Drafter):
    """Draws a chain from distributions that have nothing to do with the target's, whatever it is given to draw with."""

    name = "draw"
    is_drawn = True

    def __init__(self, rng: Rng, vocab_size: int, depth: int) -> None:
        self._rng = rng
        self._depth = depth
        self._laws: Probs = rng.dirichlet(np.full(vocab_size, 0.7), 64)  # [64, V]

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        node = -1
        for _ in range(min(self._depth, limit.depth)):
            q = self._laws[self._rng.integers(64)]
            token = index_at(q, self._rng.random())
            node = tree.add(node, token, self.name, float(q[token]), q)
            yield

    def draw_siblings(self, tokens: Sequence[int], limit: Budget, n: int = 2) -> Draft:
        """A Making: `n` i.i.d. tokens at every level, all below the first of the level above."""
        chosen, parents, distributions = [], [], []
        node = -1
        for _ in range(min(self._depth, limit.depth)):
            q = self._laws[self._rng.integers(64)]
            first = len(chosen)
            for _ in range(n):
                chosen.append(index_at(q, self._rng.random()))
                parents.append(node)
                distributions.append(q)
            node = first
        if not chosen:
            return NO_DRAFT
        return Draft(np.array(chosen, np.int32), np.array(parents, np.int32), np.stack(distributions))


Making = Callable[[Sequence[int], Budget], Draft]


class Maker:
    """A controller whose drafts a function makes from the text and the limit, which it may ignore."""

    decision = Decision("made", "by a test")
    expects_plain = False
    failures: Mapping[str, str] = MappingProxyType({})

    def __init__(self, make: Making) -> None:
        self._make = make
        self.rounds: list[Round] = []
        self.recorded: list[Step] = []
        self.begun: list[list[int]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.begun.append(list(prompt))

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        return self._make(tokens, limit)

    def observe(self, done: Round) -> None:
        self.rounds.append(replace(done, text=tuple(done.text)))

    def record(self, step: Step) -> None:
        self.recorded.append(step)

    def set_phase(self, phase: str) -> None: ...

    def end(self) -> None: ...


class RandomBudgets(Maker):
    """A controller that asks its drafters for anything, within the limits, and verifies all that they propose."""

    def __init__(self, drafters: Sequence[GuessingDrafter], rng: Rng) -> None:
        super().__init__(self._ask)
        self.drafters = drafters
        self._rng = rng
        self.proposed: dict[int, tuple[list[int], Budget, Draft]] = {}  # length of the text -> (text, limit, draft)

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        for drafter in self.drafters:
            drafter.begin(prompt, None)

    def observe(self, done: Round) -> None:
        super().observe(done)
        for drafter in self.drafters:
            drafter.observe(done)

    def _ask(self, tokens: Sequence[int], limit: Budget) -> Draft:
        wanted = Budget(int(self._rng.integers(0, 6)), int(self._rng.integers(0, 9)))
        budget, tree = Budget(min(wanted.depth, limit.depth), min(wanted.nodes, limit.nodes)), DraftTree()
        for drafter in self.drafters if budget.depth and budget.nodes else ():
            nodes = budget.nodes - len(tree)
            for _ in drafter.expand(tree, tokens, Budget(budget.depth, nodes)):
                pass
        draft = tree.select(range(len(tree)))
        self.proposed[len(tokens)] = list(tokens), limit, draft
        return draft


class Alarm:
    """A cancellation check that raises once, at its n-th call."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise Cancelled

    def silence(self) -> None:
        self._left = 0
