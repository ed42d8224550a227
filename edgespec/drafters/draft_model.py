"""Drafting with a small model (Leviathan et al. 2023), on a second session that follows the emitted tokens."""

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

_N_SIBLINGS = 3  # candidates besides the best token
_MAX_GAP = 4.0  # nats below the best token; less probable tokens are not candidates


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates for the next token of a draft, with the draft model's probabilities; the draft continues the first.

    q  [V] the distribution that the first was sampled from; None if it is the most probable token
    """

    tokens: list[int]
    probabilities: list[float]
    q: Probs | None = None


class DraftSampler(Protocol):
    """Chooses the next token of a draft from logits."""

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are sampled at random. The draft is then a chain with q, for the rejection rules."""

    def sample(self, logits: Logits, prefix: Sequence[int]) -> Candidates:
        """Candidates after `prefix`, by its logits [V]. Raises BackendError for NaN or infinite logits."""


class GreedyTopK:
    """The most probable tokens."""

    is_sampled = False

    def sample(self, logits: Logits, prefix: Sequence[int]) -> Candidates:
        best = float(logits.max())
        if not np.isfinite(best):
            raise non_finite_error()
        near = np.flatnonzero(logits >= best - _MAX_GAP)
        order = near[np.argsort(-logits[near], kind="stable")][: 1 + _N_SIBLINGS]
        total = float(np.exp(logits - best).sum(dtype=np.float64))
        return Candidates(order.tolist(), (np.exp(logits[order] - best, dtype=np.float64) / total).tolist())


class Sampled:
    """One token, sampled from the draft model's distribution after the sampler chain."""

    is_sampled = True

    def __init__(self, sampler: Sampler, rng: Rng) -> None:
        self._sampler = sampler
        self._rng = rng

    def draw(self, logits: Logits, prefix: Sequence[int]) -> tuple[int, Probs]:
        """(token after `prefix`, the distribution [V] it was sampled from). Raises BackendError as `sample` does."""
        distribution = self._sampler.distribution(logits, prefix)
        return distribution.token(index_at(distribution.weights, self._rng.random())), distribution.dense(len(logits))

    def sample(self, logits: Logits, prefix: Sequence[int]) -> Candidates:
        token, q = self.draw(logits, prefix)
        return Candidates([token], [float(q[token])], q)


class DraftModelStepper:
    """Drafts one token at a time on a session of the draft model, which belongs to the engine.

    `sync` after each round, then `start` and any number of `step`.
    """

    def __init__(self, session: Session, vocab_size: int, choice: DraftSampler) -> None:
        """`vocab_size` is the target's; the draft model may have more or fewer padding ids at the end."""
        self._session = session
        self._vocab_size = vocab_size
        self._choice = choice
        self._offset = 0  # tokens at the beginning of the text that the session does not read
        self._is_prefilled = False
        self._base = 0
        self._text: list[int] = []  # the `_base` tokens that were emitted, then the drafted ones

    @property
    def is_sampled(self) -> bool:
        return self._choice.is_sampled

    def lag(self, tokens: Sequence[int]) -> int:
        """The number of `tokens` that the session has not read."""
        is_held = self._is_prefilled or self._session.capabilities.shares_kv
        return len(tokens) - (self._offset + self._session.position if is_held else 0)

    def start(self, tokens: Sequence[int], window: int) -> Candidates | None:
        """Candidates after `tokens`; None if one of them is not in the draft model's vocabulary.

        If more than `window` tokens are unread, or more than the context holds, the session reads only the last ones.
        Raises Cancelled, BackendError.
        """
        session, limits = self._session, self._session.capabilities
        window = min(window, limits.context_size // 2)
        unread = self.lag(tokens)
        if unread > window or len(tokens) - self._offset > limits.context_size:
            self._offset, self._is_prefilled = len(tokens) - min(window, len(tokens)), False
        known = tokens[self._offset :]
        if max(known[session.position :] if self._is_prefilled else known) >= limits.vocab_size:
            return None
        if not self._is_prefilled or unread - 1 > session.draft_limit:
            if len(known) > 1:
                read_prompt(session, known[:-1])  # reuses what the cache still holds
            else:
                session.rewind(0)
            self._is_prefilled = True
        logits = score_tokens(session, known[session.position :])
        self._base, self._text = len(tokens), list(tokens)
        return self._sample(logits)

    def step(self, token: int) -> Candidates | None:
        """Candidates after `token`, the first of the previous candidates; None at the end of the context."""
        session = self._session
        if session.position >= session.capabilities.context_size:
            return None
        logits = decode_one(session, token)
        self._text.append(token)
        return self._sample(logits)

    def sync(self, text: Sequence[int]) -> None:
        """Remove drafted tokens that were not emitted from the session. `text` is prompt and output."""
        if not self._text:
            return
        agreed = self._base
        while agreed < min(len(self._text), len(text) - 1) and self._text[agreed] == text[agreed]:
            agreed += 1
        if agreed - self._offset < self._session.position:
            self._session.rewind(agreed - self._offset)
        self._text = []

    def _sample(self, logits: Logits) -> Candidates:
        return self._choice.sample(resize_logits(logits, self._vocab_size), self._text)


class GreedyChoice:
    """The most probable tokens, with siblings where the budget has more nodes than depth."""

    def draft(
        self, session: Session, unread: Sequence[int], history: Sequence[int], depth: int, width: int, vocab_size: int
    ) -> Draft:
        """The path of best tokens first, then the `width` most probable siblings by the draft model.

        `unread` is the end of `history` that is not in the session's cache. Ids from `vocab_size` on are not drafted.
        """
        chain, scores = session.rollout(unread, depth, vocab_size)
        if not width:
            return chain
        candidates: list[tuple[float, int, int]] = []
        path_probability = 1.0
        for at in range(depth):
            logits = scores.logits(at)[:vocab_size]
            top = top_k(logits, min(width + 1, len(logits)))
            top = top[np.argsort(-logits[top], kind="stable")]  # by score, then by id
            weights = np.exp(logits - logits[top[0]], dtype=np.float64)
            p = weights[top] / weights.sum()
            candidates += [(-path_probability * p[i], at, int(top[i])) for i in range(1, len(top))]
            path_probability *= float(p[0])
        siblings = sorted(candidates)[:width]
        tokens = [*chain.tokens.tolist(), *(token for _, _, token in siblings)]
        parents = [*range(-1, depth - 1), *(at - 1 for _, at, _ in siblings)]
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


class SampledChoice:
    """Tokens sampled from the draft model's distribution: a chain with q, for the rejection rules."""

    def __init__(self, sampler: Sampler, rng: Rng) -> None:
        self._sampled = Sampled(sampler, rng)

    def draft(
        self, session: Session, unread: Sequence[int], history: Sequence[int], depth: int, width: int, vocab_size: int
    ) -> Draft:
        """A chain of `depth` tokens with q [depth, vocab_size]; `unread` as in GreedyChoice."""
        logits = score_tokens(session, unread)
        path: list[int] = []
        q: list[Probs] = []
        while True:
            token, distribution = self._sampled.draw(resize_logits(logits, vocab_size), [*history, *path])
            path.append(token)
            q.append(distribution)
            if len(path) == depth:
                return Draft.chain(path, np.stack(q))
            logits = decode_one(session, path[-1])


class ModelDrafter:
    """Drafts of a fixed budget, on a session of a model with the target's vocabulary (registry.tokenizer_compat)."""

    name = "model"

    def __init__(self, session: Session, vocab_size: int, choice: GreedyChoice | SampledChoice) -> None:
        """`vocab_size` is the target's; the draft model may have more or fewer padding ids at the end."""
        self._session = session
        self._vocab_size = vocab_size
        self._choice = choice
        self._base: int | None = None  # tokens of prompt and output when the last draft was made

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._base = None
        if self._supports(prompt):
            read_prompt(self._session, prompt)
        else:
            self._session.rewind(0)

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        session = self._session
        self._base = None
        depth = min(budget.depth, budget.nodes, session.capabilities.context_size - len(tokens) + 1)
        if depth <= 0 or not self._supports(tokens[session.position :]):
            return NO_DRAFT
        if len(tokens) - session.position - 1 > session.draft_limit:
            read_prompt(self._session, tokens[:-1])
        unread = tokens[session.position :]
        width = max(0, budget.nodes - depth)
        draft = self._choice.draft(session, unread, tokens, depth, width, self._vocab_size)
        self._base = len(tokens)
        return draft

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        if self._base is None:
            return
        agreed = 0  # depth to which the best path, nodes 0, 1, 2 ..., was accepted
        while agreed < len(verdict.path) and verdict.path[agreed] == agreed:
            agreed += 1
        self._session.rewind(self._base + agreed)  # or fewer: the last drafted token was never cached
        self._base = None

    def _supports(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens are in the draft model's vocabulary and fit its context."""
        limits = self._session.capabilities
        return len(tokens) <= limits.context_size and max(tokens) < limits.vocab_size
