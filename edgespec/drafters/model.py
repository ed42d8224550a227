"""A small model as drafter (Leviathan et al. 2023): a second session, kept in step with what the target accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Probs, Rng, Scores, Session, Verdict
from edgespec.core.rollout import go_on, read_on, resized
from edgespec.core.sampling import Sampler, top_k
from edgespec.drafters.walk import Drawn


class GreedyChoice:
    """The draft's best tokens, with the runners-up as siblings when the budget has nodes to spare."""

    def draft(
        self, session: Session, missing: Sequence[int], history: Sequence[int], depth: int, spare: int, vocab_size: int
    ) -> Draft:
        """The spine first, then the `spare` siblings whose paths are most probable under the draft model.

        `missing` is the part of `history` that the session has not cached; ids from `vocab_size` on are not drafted.
        """
        spine, scores = session.rollout(missing, depth, vocab_size)
        if not spare:
            return spine
        options: list[tuple[float, int, int]] = []
        path_probability = 1.0
        for at in range(depth):
            logits = scores.logits(at)[:vocab_size]
            top = top_k(logits, min(spare + 1, len(logits)))
            top = top[np.argsort(-logits[top], kind="stable")]  # by score, then by id
            weights = np.exp(logits - logits[top[0]], dtype=np.float64)
            p = weights[top] / weights.sum()
            options += [(-path_probability * p[i], at, int(top[i])) for i in range(1, len(top))]
            path_probability *= float(p[0])
        siblings = sorted(options)[:spare]
        tokens = [*spine.tokens.tolist(), *(token for _, _, token in siblings)]
        parents = [*range(-1, depth - 1), *(at - 1 for _, at, _ in siblings)]
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


class SampledChoice:
    """Tokens drawn from the draft's own law, which the draft carries as q for the rejection rules. Chains only."""

    def __init__(self, sampler: Sampler, rng: Rng) -> None:
        self._drawn = Drawn(sampler, rng)

    def draft(
        self, session: Session, missing: Sequence[int], history: Sequence[int], depth: int, spare: int, vocab_size: int
    ) -> Draft:
        """A chain of `depth` tokens with q [depth, vocab_size]; `missing` as for GreedyChoice."""
        logits = read_on(session, missing)
        spine: list[int] = []
        q: list[Probs] = []
        while True:
            token, law = self._drawn.draw(resized(logits, vocab_size), [*history, *spine])
            spine.append(token)
            q.append(law)
            if len(spine) == depth:
                return Draft.chain(spine, np.stack(q))
            logits = go_on(session, spine[-1])


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
            self._prefill(prompt)
        else:
            self._session.rewind(0)

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        session = self._session
        self._base = None
        depth = min(budget.depth, budget.nodes, session.capabilities.context_size - len(tokens) + 1)
        if depth <= 0 or not self._can_read(tokens[session.position :]):
            return NO_DRAFT
        if len(tokens) - session.position - 1 > session.draft_limit:
            self._prefill(tokens[:-1])
        missing = tokens[session.position :]
        spare = max(0, budget.nodes - depth)
        draft = self._choice.draft(session, missing, tokens, depth, spare, self._vocab_size)
        self._base = len(tokens)
        return draft

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

    def _prefill(self, tokens: Sequence[int]) -> None:
        for _ in self._session.prefill(tokens):
            pass
