"""A small model as drafter (Leviathan et al. 2023): a second session, kept in step with what the target accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.chance import index_at
from edgespec.core.protocols import (
    NO_DRAFT,
    Budget,
    Draft,
    Indices,
    Logits,
    Probs,
    Rng,
    Scores,
    Session,
    Verdict,
)
from edgespec.core.sampling import Sampler


class GreedyChoice:
    """The draft's best token, with the runners-up as siblings when the budget has nodes to spare."""

    def __init__(self) -> None:
        self._rows: list[tuple[Indices, Probs]] = []

    def start(self) -> None:
        self._rows = []

    def choose(self, logits: Logits, prefix: Sequence[int], spare: int) -> int:
        """The next spine token; remembers `spare` alternatives with their probabilities."""
        if not spare:
            return int(logits.argmax())
        top = np.argpartition(-logits, min(spare, len(logits) - 1))[: spare + 1]
        top = top[np.lexsort((top, -logits[top]))]  # by score, then by id
        weights = np.exp(logits - logits[top[0]], dtype=np.float64)
        self._rows.append((top, weights[top] / weights.sum()))
        return int(top[0])

    def draft(self, spine: Sequence[int], spare: int) -> Draft:
        """The spine first, then the `spare` siblings whose paths are most probable under the draft model."""
        options: list[tuple[float, int, int]] = []
        path_probability = 1.0
        for depth, (top, p) in enumerate(self._rows):
            options += [(-path_probability * p[i], depth, int(top[i])) for i in range(1, len(top))]
            path_probability *= float(p[0])
        siblings = sorted(options)[:spare]
        tokens = [*spine, *(token for _, _, token in siblings)]
        parents = [*range(-1, len(spine) - 1), *(depth - 1 for _, depth, _ in siblings)]
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


class SampledChoice:
    """Tokens drawn from the draft's own law, which the draft carries as q for the rejection rules. Chains only."""

    def __init__(self, sampler: Sampler, rng: Rng) -> None:
        self._sampler = sampler
        self._rng = rng
        self._q: list[Probs] = []

    def start(self) -> None:
        self._q = []

    def choose(self, logits: Logits, prefix: Sequence[int], spare: int) -> int:
        law = self._sampler.law(logits, prefix)
        self._q.append(law.dense(len(logits)))
        return law.token(index_at(law.weights, self._rng.random()))

    def draft(self, spine: Sequence[int], spare: int) -> Draft:
        return Draft.chain(spine, np.stack(self._q))


@dataclass(slots=True)
class _Round:
    """One proposal: the draft cache held `base` history tokens and then the first `n_cached` of the spine."""

    base: int
    spine: list[int]
    n_cached: int


class ModelDrafter:
    """Drafts by a session on a model with the target's vocabulary (text.vocabulary says whether it has)."""

    name = "model"
    hidden_layers: frozenset[int] = frozenset()

    def __init__(self, session: Session, vocab_size: int, choice: GreedyChoice | SampledChoice) -> None:
        """`vocab_size` is the target's; a draft model may have more or fewer padding ids at the end."""
        self._session = session
        self._vocab_size = vocab_size
        self._choice = choice
        self._round: _Round | None = None

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._round = None
        if len(prompt) <= self._session.capabilities.context_size:
            for _ in self._session.prefill(prompt):
                pass

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        session = self._session
        self._round = None
        depth = min(budget.depth, session.capabilities.context_size - len(tokens) + 1)
        if depth <= 0:
            return NO_DRAFT
        scores, row = self._catch_up(tokens)
        session.checkpoint()
        spare = max(0, budget.nodes - depth)
        self._choice.start()
        spine: list[int] = []
        prefix = list(tokens)
        while True:
            spine.append(self._choice.choose(self._target_ids(scores.logits(row)), prefix, spare))
            if len(spine) == min(depth, budget.nodes):
                break
            prefix.append(spine[-1])
            scores, row = session.forward(spine[-1], NO_DRAFT), 0
            session.commit(())
        self._round = _Round(len(tokens), spine, len(spine) - 1)
        return self._choice.draft(spine, spare)

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        if self._round is None:
            return
        agreed = 0
        while agreed < min(len(verdict.path), self._round.n_cached) and verdict.path[agreed] == agreed:
            agreed += 1
        self._session.rewind(self._round.base + agreed)
        self._round = None

    def _catch_up(self, tokens: Sequence[int]) -> tuple[Scores, int]:
        """Cache all of `tokens`; returns scores and the row of the last one."""
        session = self._session
        missing = tokens[session.position :]
        if len(missing) - 1 > session.draft_limit:
            prefill = session.prefill(tokens)
            while True:
                try:
                    next(prefill)
                except StopIteration as end:
                    return end.value, 0
        scores = session.forward(missing[0], Draft.chain(missing[1:]))
        session.commit(range(len(missing) - 1))
        return scores, len(missing) - 1

    def _target_ids(self, logits: Logits) -> Logits:
        """[V of the target] the draft's scores cut or filled to the target's ids; ids it lacks cannot be drafted."""
        n = len(logits)
        if n >= self._vocab_size:
            return logits[: self._vocab_size]
        return np.concatenate([logits, np.full(self._vocab_size - n, -np.inf, np.float32)])
