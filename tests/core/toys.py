"""Parts for testing the loop on the toy runtime: plain decoding without the loop, drafters that guess, alarms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from edgespec.backends.toy.session import RecurrentToySession, ToyModel, ToySession
from edgespec.core.arrays import Logits, Probs, Rng
from edgespec.core.protocols import NO_DRAFT, Budget, CheckCancelled, Decision, Draft, Step, Verdict
from edgespec.core.rng import index_at, uniform
from edgespec.core.sampling import Distribution, Sampler, SamplingParams
from edgespec.core.scores import Scores
from edgespec.errors import Cancelled

KINDS = ("linear", "tree", "recurrent")


class Remembering(ToyModel):
    """The same logits, computed once for each context."""

    def logits(self, prefix: Sequence[int]) -> Logits:
        return _logits(self, tuple(prefix[-self.order :]))


@lru_cache(maxsize=100_000)
def _logits(model: ToyModel, context: tuple[int, ...]) -> Logits:
    return ToyModel.logits(model, context)


def open_session(
    kind: str, model: ToyModel, context_size: int = 256, check: CheckCancelled = lambda: None
) -> ToySession:
    if kind == "recurrent":
        return RecurrentToySession(model, context_size=context_size, check=check)
    return ToySession(model, context_size=context_size, tree=kind == "tree", chunk=3, check=check)


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
        tokens.append(distribution.token(index_at(distribution.weights, uniform(seed, len(tokens)))))
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


class GuessingDrafter:
    """Random chains or trees that follow `truth` (the whole text) with probability `aim` at every node.

    `eager` ignores the depth it was given. Keeps what it was asked and observed.
    """

    name = "guess"

    def __init__(self, rng: Rng, vocab_size: int, truth: Sequence[int], *, tree: bool, aim: float, eager: bool) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._truth = truth
        self._tree = tree
        self._aim = aim
        self._eager = eager
        self.proposed: list[tuple[list[int], Budget, Draft]] = []
        self.observed: list[Verdict] = []

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        assert scores.logits(0).shape == (self._vocab_size,)

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        paths: list[list[int]] = [list(tokens)]  # of the root and every node
        parents: list[int] = []
        for _ in range(int(self._rng.integers(0, budget.nodes + 1))):
            parent = int(self._rng.integers(-1, len(parents))) if self._tree else len(parents) - 1
            above = paths[parent + 1]
            depth = len(above) - len(tokens)
            aims = self._rng.random() < self._aim and len(above) < len(self._truth)
            token = self._truth[len(above)] if aims else int(self._rng.integers(self._vocab_size))
            if [*above, token] not in paths and (self._eager or depth < budget.depth):
                paths.append([*above, token])
                parents.append(parent)
        draft = Draft(np.array([p[-1] for p in paths[1:]], np.int32), np.array(parents, np.int32))
        self.proposed.append((list(tokens), budget, draft))
        return draft if len(draft) else NO_DRAFT

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        self.observed.append(verdict)


class DrawingDrafter:
    """Samples from distributions unrelated to the target: chains, or `siblings` at every level below the first."""

    name = "draw"

    def __init__(self, rng: Rng, vocab_size: int, depth: int, siblings: int = 1) -> None:
        self._rng = rng
        self._depth = depth
        self._siblings = siblings
        self._laws: Probs = rng.dirichlet(np.full(vocab_size, 0.7), 64)  # [64, V]

    def begin(self, prompt: Sequence[int], scores: Scores) -> None: ...

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        chosen, parents, distributions = [], [], []
        node = -1
        for _ in range(min(self._depth, budget.depth)):
            q = self._laws[self._rng.integers(64)]
            first = len(chosen)
            for _ in range(self._siblings):  # i.i.d., all below the first child of the level above
                chosen.append(index_at(q, self._rng.random()))
                parents.append(node)
                distributions.append(q)
            node = first
        return Draft(np.array(chosen, np.int32), np.array(parents, np.int32), np.stack(distributions))

    def observe(self, verdict: Verdict, scores: Scores) -> None: ...


class RandomBudgets:
    """A controller that asks its drafter for anything, within the limits."""

    decision = Decision("guess", "at random")
    expects_plain = False

    def __init__(self, drafter: GuessingDrafter, rng: Rng) -> None:
        self.drafter = drafter
        self._rng = rng
        self.recorded: list[Step] = []

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self.drafter.begin(prompt, scores)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        wanted = Budget(int(self._rng.integers(0, 6)), int(self._rng.integers(0, 9)))
        budget = wanted.clamp(depth=limit.depth, nodes=limit.nodes)
        return self.drafter.propose(tokens, budget) if budget.depth and budget.nodes else NO_DRAFT

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        self.drafter.observe(verdict, scores)

    def record(self, step: Step) -> None:
        self.recorded.append(step)


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
