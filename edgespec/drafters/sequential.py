"""Drafters that run one forward for each token (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.core.arrays import Logits
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, DraftSession, TokenDraw
from edgespec.core.greedy import decode_one, resize_logits, score_tokens
from edgespec.core.protocols import Budget, Draft, Session
from edgespec.core.scores import Scores
from edgespec.drafters.sampling import best_tokens
from edgespec.drafters.text_reader import TextReader


class ModelDraftSession:
    """A DraftSession over any Session: a draft model's, or one that shares the target's KV cache."""

    def __init__(self, session: Session, vocab_size: int) -> None:
        """`vocab_size` is the target's; the draft model may have more or fewer padding ids at the end."""
        self._session = session
        self._reader = TextReader(session)
        self._vocab_size = vocab_size

    @property
    def is_lazy(self) -> bool:
        return self._session.capabilities.is_lazy

    @property
    def text(self) -> Sequence[int]:
        return self._reader.text

    def begin(self, text: Sequence[int]) -> None:
        self._reader.begin(text)

    def unread(self, text: Sequence[int]) -> int:
        return self._reader.unread(text)

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        unread = self._reader.prepare(text, window)
        return None if unread is None else resize_logits(score_tokens(self._session, unread), self._vocab_size)

    def step(self, token: int) -> Logits | None:
        session = self._session
        if session.position >= session.capabilities.context_size:
            return None
        logits = decode_one(session, token)
        self._reader.append(token)
        return resize_logits(logits, self._vocab_size)

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        unread = self._reader.prepare(text, window, n - 1)
        if unread is None:
            return None
        session = self._session
        n = min(n, session.capabilities.context_size - session.position - len(unread) + 1)
        chain, scores = session.rollout(unread, n, self._vocab_size)
        self._reader.append_unread(chain)
        return chain, scores

    def close(self) -> None:
        self._session.close()


class SequentialDrafter(Drafter):
    """Proposes the most probable token and its siblings, unit by unit; or draws a chain."""

    def __init__(self, name: str, session: DraftSession) -> None:
        """Closes `session` when it is closed."""
        self.name = name
        self._session = session
        self._draw: TokenDraw | None = None

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._draw, self.is_drawn = draw, draw is not None
        self.is_lazy = self._session.is_lazy and draw is None
        self._session.begin(text)

    def unread(self, text: Sequence[int]) -> int:
        return self._session.unread(text)

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        session, parent = self._session, -1
        logits = session.read(text, len(text) if limit.read is None else limit.read)
        for depth in range(1, limit.depth + 1):
            if logits is None:  # a token that the draft does not know, or the end of its context
                return
            parent = self._propose(tree, parent, logits, limit.nodes)
            yield
            if depth < limit.depth:
                logits = session.step(tree.tokens[parent])

    def draft_unread(self, text: Sequence[int], limit: Budget) -> Draft | None:
        if not self.is_lazy:
            return None
        chain = self._session.rollout(text, len(text) if limit.read is None else limit.read, limit.depth)
        return None if chain is None else chain[0]

    def close(self) -> None:
        self._session.close()

    def _propose(self, tree: DraftTree, parent: int, logits: Logits, max_nodes: int) -> int:
        """Add the candidates below `parent`; returns the one to continue."""
        if self._draw is not None:
            token, q = self._draw.draw(logits, self._session.text)
            return tree.add(parent, token, self.name, float(q[token]), q)
        tokens, probabilities = best_tokens(logits)
        first = tree.add(parent, tokens[0], self.name, probabilities[0])
        for token, probability in zip(tokens[1:], probabilities[1:], strict=True):
            tree.add(parent, token, self.name, probability)
        return first
