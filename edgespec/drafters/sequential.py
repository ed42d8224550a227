"""Drafters that run one forward for each token of a chain (Leviathan et al. 2023), or for several of a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import Any

from edgespec.core.arrays import Logits
from edgespec.core.decoding import decode_one, read_prompt, resize_logits, score_tokens
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import MAX_TREE, TREE_WIDTH, Drafter, DraftSession, TokenDraw
from edgespec.core.protocols import NO_DRAFT, AsyncSession, Budget, Draft, Session
from edgespec.core.scores import Scores
from edgespec.drafters.candidates import best_tokens


class TextReader:
    """Follows a text on a session, which may hold the text's end alone."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._offset = 0  # tokens at the beginning of the text that the session does not read
        self._is_prefilled = False
        self.text: list[int] = []  # the `_base` tokens that were emitted, then the drafted ones
        self._base = 0
        self._chain = NO_DRAFT  # drafted after them and not read by the host yet; the session may hold fewer tokens
        self._tree = NO_DRAFT  # drafted after them one by one, or as a tree that the session does not hold

    def begin(self, text: Sequence[int]) -> None:
        """Start a generation from `text`; keeps the part of it that the session holds."""
        kept, self._chain = 0, NO_DRAFT
        while kept < min(len(self.text), len(text) - 1) and self.text[kept] == text[kept]:
            kept += 1
        if self.session.capabilities.shares_kv or not self._is_prefilled or kept <= self._offset:
            self._offset, self._is_prefilled, kept = 0, False, 0
        else:  # also drops a forward that was cancelled
            kept = self._offset + self.session.rewind(min(kept - self._offset, self.session.position))
        del self.text[kept:]
        self._base = kept

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Tokens of `text` that the session has not read. Drops the drafted ones that are not in it."""
        self.settle(text)
        is_held = self._is_prefilled or self.session.capabilities.shares_kv
        return len(text) - (self._offset + self.session.position if is_held else 0)

    def prepare(self, text: Sequence[int], window: int, rows: int = 0) -> list[int] | None:
        """Read so much of `text` that the rest, at least one token, and `rows` more fit one forward; returns the rest.

        If more than `window` tokens are unread, or more than the context holds, the session reads only the last ones.
        None if one of them is not in its vocabulary. Raises Cancelled, BackendError.
        """
        session, limits = self.session, self.session.capabilities
        window = max(1, min(window, limits.context_size // 2))
        unread = self.pending_tokens(text)
        if unread > window or len(text) + rows - self._offset > limits.context_size:
            self._offset, self._is_prefilled = len(text) - min(window, len(text)), False
        if max(text[self._offset + (session.position if self._is_prefilled else 0) :]) >= limits.vocab_size:
            return None
        if not self._is_prefilled or unread - 1 + rows > session.draft_limit:
            if len(text) - self._offset > 1:
                read_prompt(session, text[self._offset : -1])  # reuses what the cache still holds
            else:
                session.rewind(0)
            self._is_prefilled = True
        self.text += text[len(self.text) :]
        self._base, self._tree = len(text), NO_DRAFT
        return list(text[self._offset + session.position :])

    def close(self) -> None:
        self.session.close()

    def settle(self, text: Sequence[int]) -> None:
        """Remove drafted tokens that are not in `text`, prompt and output, from the session."""
        self.text += self._chain.tokens.tolist()
        self._chain = NO_DRAFT
        agreed = min(self._base, len(text) - 1)
        while agreed < min(len(self.text), len(text) - 1) and self.text[agreed] == text[agreed]:
            agreed += 1
        if agreed - self._offset < self.session.position:
            self.session.rewind(max(0, agreed - self._offset))
        del self.text[agreed:]
        self._base = agreed


class ModelDraftSession(TextReader):
    """A DraftSession over any Session: a draft model's, or one that shares the target's KV cache."""

    def __init__(self, session: Session, vocab_size: int) -> None:
        """`vocab_size` is the target's; the draft model may have more or fewer padding ids at the end."""
        super().__init__(session)
        self._vocab_size = vocab_size

    @property
    def is_async(self) -> bool:
        return isinstance(self.session, AsyncSession)

    @property
    def takes_trees(self) -> bool:
        return self.session.capabilities.tree

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        unread = self.prepare(text, window)
        return None if unread is None else resize_logits(score_tokens(self.session, unread), self._vocab_size)

    def step(self, token: int) -> Logits | None:
        session = self.session
        if session.position >= session.capabilities.context_size:
            return None
        logits = decode_one(session, token)
        self.text.append(token)
        self._tree = self._tree.extend([token], [len(self._tree) - 1])
        return resize_logits(logits, self._vocab_size)

    def branch(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Logits] | None:
        """All nodes run again beside the new ones, as rows of one forward."""
        session, root = self.session, self._base - 1
        tree, first = self._tree.extend(tokens, parents), 1 + len(self._tree)
        del self.text[self._base :]
        if session.rewind(root - self._offset) < root - self._offset or len(tree) > session.draft_limit:
            return None
        scores = session.forward(self.text[root], tree)
        rows = [resize_logits(scores.logits(first + i), self._vocab_size).copy() for i in range(len(tokens))]
        session.commit(())
        self._tree = tree
        return rows

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        unread = self.prepare(text, window, n - 1)
        if unread is None:
            return None
        session = self.session
        assert isinstance(session, AsyncSession)
        n = min(n, session.capabilities.context_size - session.position - len(unread) + 1)
        chain, scores = session.rollout(unread, n, self._vocab_size)
        self._chain = chain
        return chain, scores


class SessionDrafter(Drafter):
    """A drafter over a session, which it closes when it is closed."""

    def __init__(self, name: str, session: Any) -> None:
        """`session` is a DraftSession or a BlockSession."""
        self.name = name
        self._session = session
        self._draw: TokenDraw | None = None

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._draw, self.is_drawn = draw, draw is not None
        self._session.begin(text)

    def pending_tokens(self, text: Sequence[int]) -> int:
        return int(self._session.pending_tokens(text))

    def close(self) -> None:
        self._session.close()


class SequentialDrafter(SessionDrafter):
    """Proposes the most probable token and its siblings, unit by unit; or draws a chain or a tree.

    A chain continues the most probable token. A tree continues in each forward the nodes whose paths are the most
    probable, siblings among them (EAGLE-2, Li et al. 2024, arXiv:2406.16858, which continues the deepest nodes).
    """

    _session: DraftSession

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self.is_async = self._session.is_async and draw is None
        self.grows_trees = self._session.takes_trees and (draw is None or draw.takes_trees)
        super().begin(text, draw)

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        session, parent = self._session, -1
        logits = session.read(text, len(text) if limit.read is None else limit.read)
        if self.grows_trees and limit.has_branches and logits is not None:
            yield from self._grow(tree, logits, limit) if self._draw is None else self._draw_tree(tree, logits, limit)
            return
        for depth in range(1, limit.depth + 1):
            if logits is None:  # a token that the draft does not know, or the end of its context
                return
            parent = self._propose(tree, parent, logits)[0][0]
            yield
            if depth < limit.depth:
                logits = session.step(tree.tokens[parent])

    def _grow(self, tree: DraftTree, logits: Logits, limit: Budget) -> Iterator[None]:
        """Add a tree, whose root has the scores `logits`, with `limit.depth` forwards at most."""
        reached, waiting = {-1: 1.0}, list[int]()  # probabilities of paths; nodes that may be continued
        places = {-1: -1}  # of nodes in the session's tree
        nodes, rows, is_path = [-1], [logits], True
        for left in reversed(range(limit.depth)):  # forwards after this one
            for parent, row in zip(nodes, rows, strict=True):
                found = self._propose(tree, parent, row)
                reached |= {node: reached[parent] * probability for node, probability in found}
                waiting += [node for node, _ in found if tree.depths[node] < limit.depth]
            yield
            best = nlargest(limit.nodes, reached.values())[-1]  # what is less probable leads to nothing that is kept
            least = best if len(reached) > limit.nodes else 0.0
            room = max(1, MAX_TREE + 1 - len(places) - left)  # one node for each further forward stays free
            worth = [node for node in waiting if reached[node] >= max(limit.reach, least)]
            nodes = nlargest(min(TREE_WIDTH, room), worth, key=reached.__getitem__)
            if not nodes or not left:
                return
            parents = [places[tree.parents[node]] for node in nodes]
            is_path = is_path and parents == [len(places) - 2]
            places |= {node: len(places) - 1 + i for i, node in enumerate(nodes)}
            waiting = [node for node in waiting if node not in nodes]
            if (continued := self._continue([tree.tokens[node] for node in nodes], parents, is_path=is_path)) is None:
                return
            rows = continued

    def _draw_tree(self, tree: DraftTree, logits: Logits, limit: Budget) -> Iterator[None]:
        """Draw siblings without replacement (Jeon et al. 2024), for recursive rejection (Miao et al. 2024, SpecInfer).

        How many are drawn below a node, and whether it is continued, depends only on what was drawn before, and all are
        kept: else the distribution of the output would change. Each level gets an equal share of the nodes.
        """
        assert self._draw is not None
        text, reached, places = list(self._session.text), {-1: 1.0}, {-1: -1}
        nodes, rows, is_path = [-1], [logits], True
        for left in reversed(range(limit.depth)):
            start, shares = len(tree), _divide((limit.nodes - len(tree)) // (left + 1), [reached[n] for n in nodes])
            for parent, row, n in zip(nodes, rows, shares, strict=True):
                for token, q in self._draw.draw_siblings(row, [*text, *tree.path_tokens(parent)], n):
                    node = tree.add(parent, token, self.name, float(q[token]), q)
                    reached[node] = reached[parent] * float(q[token])
            yield
            nodes = nlargest(min(TREE_WIDTH, MAX_TREE - len(places)), range(start, len(tree)), key=reached.__getitem__)
            if not nodes or not left:
                return
            parents = [places[tree.parents[node]] for node in nodes]
            is_path = is_path and parents == [len(places) - 2]
            places |= {node: len(places) - 1 + i for i, node in enumerate(nodes)}
            if (continued := self._continue([tree.tokens[node] for node in nodes], parents, is_path=is_path)) is None:
                return
            rows = continued

    def _continue(self, tokens: list[int], parents: list[int], *, is_path: bool) -> list[Logits] | None:
        """The logits after new nodes of the session's tree; None if it has no room.

        `is_path`: the tree is a path still, which one more token continues, so that no node of it runs again.
        """
        if not is_path:
            return self._session.branch(tokens, parents)
        logits = self._session.step(tokens[0])
        return None if logits is None else [logits]

    def draft_async(self, text: Sequence[int], limit: Budget) -> Draft | None:
        if not self.is_async:
            return None
        chain = self._session.rollout(text, len(text) if limit.read is None else limit.read, limit.depth)
        return None if chain is None else chain[0]

    def _propose(self, tree: DraftTree, parent: int, logits: Logits) -> list[tuple[int, float]]:
        """Add the candidates below `parent`, the most probable first; returns them with their probabilities."""
        if self._draw is not None:
            token, q = self._draw.draw(logits, self._session.text)
            return [(tree.add(parent, token, self.name, float(q[token]), q), float(q[token]))]
        candidates = zip(*best_tokens(logits), strict=True)
        return [(tree.add(parent, token, self.name, probability), probability) for token, probability in candidates]


def _divide(n: int, weights: list[float]) -> list[int]:
    """`n` things among `weights` in proportion, by largest remainders."""
    total = sum(weights)
    exact = [n * weight / total for weight in weights]
    shares = [int(each) for each in exact]
    for i in nlargest(n - sum(shares), range(len(weights)), key=lambda i: exact[i] - shares[i]):
        shares[i] += 1
    return shares
