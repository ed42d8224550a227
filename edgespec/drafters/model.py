"""A small model as drafter (Leviathan et al. 2023): a second session, kept in step with what the target accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.chance import index_at
from edgespec.core.protocols import (
    NO_DRAFT,
    Budget,
    Draft,
    Ints,
    Logits,
    Probs,
    Rng,
    Scores,
    Session,
    Verdict,
)
from edgespec.core.sampling import Sampler, top_k


class GreedyChoice:
    """The draft's best token, with the runners-up as siblings when the budget has nodes to spare."""

    def __init__(self) -> None:
        self._rows: list[tuple[Ints, Probs]] = []

    def start(self) -> None:
        self._rows = []

    def choose(self, logits: Logits, prefix: Sequence[int], spare: int) -> int:
        """The next spine token; remembers `spare` alternatives with their probabilities."""
        if not spare:
            return int(logits.argmax())
        top = top_k(logits, min(spare + 1, len(logits)))
        top = top[np.argsort(-logits[top], kind="stable")]  # by score, then by id
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


class ModelDrafter:
    """Drafts by a session on a model with the target's vocabulary (text.vocabulary says whether it has)."""

    name = "model"
    hidden_layers: frozenset[int] = frozenset()

    def __init__(self, session: Session, vocab_size: int, choice: GreedyChoice | SampledChoice) -> None:
        """`vocab_size` is the target's; a draft model may have more or fewer padding ids at the end."""
        self._session = session
        self._vocab_size = vocab_size
        self._choice = choice
        self._base: int | None = None  # history tokens that the cache held when the last draft was made

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._base = None
        if self._can_read(prompt):
            for _ in self._session.prefill(prompt):
                pass
        else:
            self._session.rewind(0)

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        session = self._session
        self._base = None
        depth = min(budget.depth, session.capabilities.context_size - len(tokens) + 1)
        if depth <= 0 or not self._can_read(tokens[session.position :]):
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
        self._base = len(tokens)
        return self._choice.draft(spine, spare)

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        if self._base is None:
            return
        agreed = 0  # how far the accepted path follows the spine, whose nodes come first: 0, 1, 2 ...
        while agreed < len(verdict.path) and verdict.path[agreed] == agreed:
            agreed += 1
        self._session.rewind(self._base + agreed)  # the last spine token was never cached: rewind is "at most"
        self._base = None

    def _can_read(self, tokens: Sequence[int]) -> bool:
        """Whether the draft model has all these ids and a context that long."""
        limits = self._session.capabilities
        return len(tokens) <= limits.context_size and max(tokens) < limits.vocab_size

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
