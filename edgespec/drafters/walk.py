"""A draft model's continuation one token at a time, for whoever decides after each whether another is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgespec.core.chance import index_at
from edgespec.core.protocols import Logits, Probs, Rng, Session
from edgespec.core.rollout import go_on, read_on, resized
from edgespec.core.sampling import Sampler, not_numbers

_RUNNERS_UP = 3
_FAR_BEHIND = 4.0  # nats below the best token; less likely ones are no candidates


@dataclass(frozen=True, slots=True)
class Options:
    """Where a draft may go on: `tokens` with the `probabilities` that the draft model gives them, the one to follow
    first. `q` [V] is the law that it was drawn from; None where it is the best one."""

    tokens: list[int]
    probabilities: list[float]
    q: Probs | None = None


class Choice(Protocol):
    """How a walk goes on."""

    @property
    def is_drawn(self) -> bool:
        """Whether tokens are drawn at random, which makes the draft a chain for the rejection rules."""

    def options(self, logits: Logits, prefix: Sequence[int]) -> Options:
        """Raises BackendError where the scores are no numbers."""


class BestFirst:
    """The best token, and a few runners-up."""

    is_drawn = False

    def options(self, logits: Logits, prefix: Sequence[int]) -> Options:
        best = float(logits.max())
        if not np.isfinite(best):
            raise not_numbers()
        near = np.flatnonzero(logits >= best - _FAR_BEHIND)
        order = near[np.argsort(-logits[near], kind="stable")][: 1 + _RUNNERS_UP]
        total = float(np.exp(logits - best).sum(dtype=np.float64))
        return Options(order.tolist(), (np.exp(logits[order] - best, dtype=np.float64) / total).tolist())


class Drawn:
    """A token of the draft's own law after the sampler chain."""

    is_drawn = True

    def __init__(self, sampler: Sampler, rng: Rng) -> None:
        self._sampler = sampler
        self._rng = rng

    def draw(self, logits: Logits, prefix: Sequence[int]) -> tuple[int, Probs]:
        """A token after `prefix` and the law [V] it was drawn from. Raises BackendError where the scores are none."""
        law = self._sampler.law(logits, prefix)
        return law.token(index_at(law.weights, self._rng.random())), law.dense(len(logits))

    def options(self, logits: Logits, prefix: Sequence[int]) -> Options:
        token, q = self.draw(logits, prefix)
        return Options([token], [float(q[token])], q)


class Walk:
    """A session on the draft model, kept in step with the text. It belongs to the engine."""

    def __init__(self, session: Session, vocab_size: int, choice: Choice) -> None:
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

    def behind(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` the session has yet to read."""
        is_held = self._is_begun or self._session.capabilities.follows
        return len(tokens) - (self._skipped + self._session.position if is_held else 0)

    def start(self, tokens: Sequence[int], window: int) -> Options | None:
        """Options after `tokens`; None where the draft model does not have all of them.

        Where more than `window` of them are unread, or more than its context holds, it is given the last of them alone.
        """
        session, limits = self._session, self._session.capabilities
        window = min(window, limits.context_size // 2)
        unread = self.behind(tokens)
        if unread > window or len(tokens) - self._skipped > limits.context_size:
            self._skipped, self._is_begun = len(tokens) - min(window, len(tokens)), False
        known = tokens[self._skipped :]
        if max(known[session.position :] if self._is_begun else known) >= limits.vocab_size:
            return None
        if not self._is_begun or unread - 1 > session.draft_limit:
            if len(known) == 1:
                session.rewind(0)
            for _ in session.prefill(known[:-1]) if len(known) > 1 else ():  # what the cache still has is not run again
                pass
            self._is_begun = True
        logits = read_on(session, known[session.position :])
        self._base, self._text = len(tokens), list(tokens)
        return self._options(logits)

    def go_on(self, token: int) -> Options | None:
        """Options after `token`, the first of the last ones; None at the end of the draft model's context."""
        session = self._session
        if session.position >= session.capabilities.context_size:
            return None
        logits = go_on(session, token)
        self._text.append(token)
        return self._options(logits)

    def settle(self, text: Sequence[int]) -> None:
        """Forget what is not part of `text`, which has grown by what was emitted; its last token is read again."""
        if not self._text:
            return
        agreed = self._base
        while agreed < min(len(self._text), len(text) - 1) and self._text[agreed] == text[agreed]:
            agreed += 1
        if agreed - self._skipped < self._session.position:
            self._session.rewind(agreed - self._skipped)
        self._text = []

    def _options(self, logits: Logits) -> Options:
        return self._choice.options(resized(logits, self._vocab_size), self._text)
