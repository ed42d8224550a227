"""A small model as drafter (Leviathan et al. 2023): a second session, kept in step with what the target accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgespec.core.arrays import Logits, Probs, Rng
from edgespec.core.greedy import decode_one, read_prompt, resize_logits, score_tokens
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Session, Verdict
from edgespec.core.rng import index_at
from edgespec.core.sampling import Sampler, non_finite_error, top_k
from edgespec.core.scores import Scores

_RUNNERS_UP = 3
_FAR_BEHIND = 4.0  # nats below the best token; less likely ones are no candidates


@dataclass(frozen=True, slots=True)
class Candidates:
    """Where a draft may go on: `tokens` with the `probabilities` that the draft model gives them, the one to follow
    first. `q` [V] is the law that it was drawn from; None where it is the best one."""

    tokens: list[int]
    probabilities: list[float]
    q: Probs | None = None


class DraftSampler(Protocol):
    """How a walk goes on."""

    @property
    def is_drawn(self) -> bool:
        """Whether tokens are drawn at random, which makes the draft a chain for the rejection rules."""

    def options(self, logits: Logits, prefix: Sequence[int]) -> Candidates:
        """Raises BackendError where the scores are no numbers."""


class GreedyTopK:
    """The best token, and a few runners-up."""

    is_drawn = False

    def options(self, logits: Logits, prefix: Sequence[int]) -> Candidates:
        best = float(logits.max())
        if not np.isfinite(best):
            raise non_finite_error()
        near = np.flatnonzero(logits >= best - _FAR_BEHIND)
        order = near[np.argsort(-logits[near], kind="stable")][: 1 + _RUNNERS_UP]
        total = float(np.exp(logits - best).sum(dtype=np.float64))
        return Candidates(order.tolist(), (np.exp(logits[order] - best, dtype=np.float64) / total).tolist())


class Sampled:
    """A token of the draft's own law after the sampler chain."""

    is_drawn = True

    def __init__(self, sampler: Sampler, rng: Rng) -> None:
        self._sampler = sampler
        self._rng = rng

    def draw(self, logits: Logits, prefix: Sequence[int]) -> tuple[int, Probs]:
        """A token after `prefix` and the law [V] it was drawn from. Raises BackendError where the scores are none."""
        distribution = self._sampler.distribution(logits, prefix)
        return distribution.token(index_at(distribution.weights, self._rng.random())), distribution.dense(len(logits))

    def options(self, logits: Logits, prefix: Sequence[int]) -> Candidates:
        token, q = self.draw(logits, prefix)
        return Candidates([token], [float(q[token])], q)


class DraftModelStepper:
    """A session on the draft model, kept in step with the text. It belongs to the engine."""

    def __init__(self, session: Session, vocab_size: int, choice: DraftSampler) -> None:
        """`vocab_size` is the target's; a draft model may have more or fewer padding ids at the end."""
        self._session = session
        self._vocab_size = vocab_size
        self._choice = choice
        self._skipped = 0  # tokens at the beginning of the text that the session was not given
        self._is_begun = False
        self._base = 0
        self._text: list[int] = []  # what the walk began from, `base` tokens, and those it went on with

    @property
    def is_drawn(self) -> bool:
        return self._choice.is_drawn

    def lag(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` the session has yet to read."""
        is_held = self._is_begun or self._session.capabilities.shares_kv
        return len(tokens) - (self._skipped + self._session.position if is_held else 0)

    def start(self, tokens: Sequence[int], window: int) -> Candidates | None:
        """Candidates after `tokens`; None where the draft model does not have all of them.

        Where more than `window` of them are unread, or more than its context holds, it is given the last of them alone.
        """
        session, limits = self._session, self._session.capabilities
        window = min(window, limits.context_size // 2)
        unread = self.lag(tokens)
        if unread > window or len(tokens) - self._skipped > limits.context_size:
            self._skipped, self._is_begun = len(tokens) - min(window, len(tokens)), False
        known = tokens[self._skipped :]
        if max(known[session.position :] if self._is_begun else known) >= limits.vocab_size:
            return None
        if not self._is_begun or unread - 1 > session.draft_limit:
            if len(known) > 1:
                read_prompt(session, known[:-1])  # reuses what the cache still holds
            else:
                session.rewind(0)
            self._is_begun = True
        logits = score_tokens(session, known[session.position :])
        self._base, self._text = len(tokens), list(tokens)
        return self._options(logits)

    def step(self, token: int) -> Candidates | None:
        """Candidates after `token`, the first of the last ones; None at the end of the draft model's context."""
        session = self._session
        if session.position >= session.capabilities.context_size:
            return None
        logits = decode_one(session, token)
        self._text.append(token)
        return self._options(logits)

    def sync(self, text: Sequence[int]) -> None:
        """Forget what is not part of `text`, which has grown by what was emitted; its last token is read again."""
        if not self._text:
            return
        agreed = self._base
        while agreed < min(len(self._text), len(text) - 1) and self._text[agreed] == text[agreed]:
            agreed += 1
        if agreed - self._skipped < self._session.position:
            self._session.rewind(agreed - self._skipped)
        self._text = []

    def _options(self, logits: Logits) -> Candidates:
        return self._choice.options(resize_logits(logits, self._vocab_size), self._text)


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
        self._drawn = Sampled(sampler, rng)

    def draft(
        self, session: Session, missing: Sequence[int], history: Sequence[int], depth: int, spare: int, vocab_size: int
    ) -> Draft:
        """A chain of `depth` tokens with q [depth, vocab_size]; `missing` as for GreedyChoice."""
        logits = score_tokens(session, missing)
        spine: list[int] = []
        q: list[Probs] = []
        while True:
            token, distribution = self._drawn.draw(resize_logits(logits, vocab_size), [*history, *spine])
            spine.append(token)
            q.append(distribution)
            if len(spine) == depth:
                return Draft.chain(spine, np.stack(q))
            logits = decode_one(session, spine[-1])


class ModelDrafter:
    """Drafts by a session on a model with the target's vocabulary (registry.tokenizer_compat says whether it has)."""

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
            read_prompt(self._session, prompt)
        else:
            self._session.rewind(0)

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        session = self._session
        self._base = None
        depth = min(budget.depth, budget.nodes, session.capabilities.context_size - len(tokens) + 1)
        if depth <= 0 or not self._can_read(tokens[session.position :]):
            return NO_DRAFT
        if len(tokens) - session.position - 1 > session.draft_limit:
            read_prompt(self._session, tokens[:-1])
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
