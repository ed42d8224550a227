"""Token recycling (Luo et al. 2024): drafts along the tokens that the target itself found probable after each token.

Every row of scores in host memory says which tokens may follow its own. Of each token the last such row is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edgespec.core.arrays import Ints, Logits
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Round
from edgespec.core.scores import Scores

WIDTH = 8  # successors kept of a token
_MAX_GAP = 4.0  # nats below the best token; less probable tokens are no successors
_LEAST_PATH = 0.03  # probability of a path that is proposed
_FOLLOWED = 0.5  # share of a successor that was emitted, if its row was not read
_MAX_ROWS = 16  # rows that are learned from in a round
_ROW = np.dtype([("token", "<i4"), ("successors", "<i4", WIDTH), ("shares", "<f2", WIDTH)])


class SuccessorTable:
    """The successors of each token by its last row, the most probable first, with their shares of the probability.

    tokens  [V, WIDTH] int32
    shares  [V, WIDTH] float16; 0 if there are fewer successors
    """

    def __init__(self, vocab_size: int) -> None:
        self._tokens: Ints = np.zeros((vocab_size, WIDTH), np.int32)  # memory is used where a row is written
        self._shares = np.zeros((vocab_size, WIDTH), np.float16)

    def learn(self, token: int, logits: Logits) -> None:
        """Replace the successors of `token` by the best of `logits` [V], those after a text that ends with it."""
        best = logits[logits.argmax()]
        near = np.flatnonzero(logits > best - _MAX_GAP)
        if not len(near):  # not finite
            return
        weights = np.exp(logits[near] - best, dtype=np.float32)
        order = np.argsort(-weights, kind="stable")[:WIDTH]
        n = len(order)
        self._tokens[token, :n] = near[order]
        self._shares[token, :n] = weights[order] / weights.sum()
        self._shares[token, n:] = 0

    def follow(self, token: int, successor: int) -> None:
        """`successor` was emitted after `token`, by a row that was not read."""
        others = [each for each in self.successors(token) if each[0] != successor][: WIDTH - 1]
        kept = [(successor, _FOLLOWED), *((other, share * _FOLLOWED) for other, share in others)]
        for i, (other, share) in enumerate(kept):
            self._tokens[token, i], self._shares[token, i] = other, share

    def successors(self, token: int) -> list[tuple[int, float]]:
        """(successor, its share), the most probable first."""
        shares = self._shares[token].tolist()
        return [each for each in zip(self._tokens[token].tolist(), shares, strict=True) if each[1] > 0]

    def dump(self) -> bytes:
        """What `load` takes: the number of tokens in the vocabulary, and the rows that are in use."""
        used = np.flatnonzero(self._shares[:, 0])
        rows = np.empty(len(used), _ROW)
        rows["token"], rows["successors"], rows["shares"] = used, self._tokens[used], self._shares[used]
        return np.int32(len(self._tokens)).tobytes() + rows.tobytes()

    @staticmethod
    def load(vocab_size: int, saved: bytes | None) -> SuccessorTable:
        """An empty table if `saved` is None, or cannot be the dump of one of `vocab_size` tokens."""
        table = SuccessorTable(vocab_size)
        if saved is None or saved[:4] != np.int32(vocab_size).tobytes() or len(saved[4:]) % _ROW.itemsize:
            return table
        rows = np.frombuffer(saved, _ROW, offset=4)
        tokens = np.concatenate((rows["token"], rows["successors"].ravel()))
        if ((tokens >= 0) & (tokens < vocab_size)).all() and ((rows["shares"] >= 0) & (rows["shares"] <= 1)).all():
            table._tokens[rows["token"]] = rows["successors"]
            table._shares[rows["token"]] = rows["shares"]
        return table


class RecyclingDrafter(Drafter):
    """It proposes the chain of the most probable successors and, as far as the budget goes, the most probable paths."""

    name = "recycling"
    is_free = pads_batch = True

    def __init__(self, open_table: Callable[[], SuccessorTable]) -> None:
        """`open_table` returns the table of a generation, at its beginning."""
        self._open_table = open_table
        self._table = open_table()

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._table = self._open_table()

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self._add_chain(tree, text[-1], min(limit.depth, limit.nodes))
        tree.add_most_probable(self.name, limit, self._follow, text[-1], _LEAST_PATH)
        yield

    def observe(self, done: Round) -> Sequence[Outcome]:
        if done.scores is None:
            return ()
        n = len(done.emitted)
        pairs = [*zip(done.text[-n - 1 : -1], done.emitted, strict=True)]
        outcomes = [
            Outcome(share, successor == token)
            for last, token in pairs
            for successor, share in self._table.successors(last)
            if share >= _LEAST_PATH
        ]
        if done.scores.host_logits(0) is None:
            for last, token in pairs:
                self._table.follow(last, token)
        else:
            self._learn([pairs[0][0], *done.draft.tokens.tolist()], done.path, done.scores)
        return outcomes

    def _follow(self, token: int, depth: int) -> list[tuple[int, float, int]]:
        """(successor, its share, successor)"""
        return [(successor, share, successor) for successor, share in self._table.successors(token)]

    def _learn(self, tokens: list[int], path: Sequence[int], scores: Scores) -> None:
        """`tokens` [rows] are those of the draft's root and nodes. Rows outside of the accepted path count less."""
        accepted = [0, *(node + 1 for node in path)]
        rejected = [row for row in range(len(tokens)) if row not in accepted]
        rows = {tokens[row]: row for row in (*rejected, *accepted)}  # of each token the last one
        for token, row in [*rows.items()][-_MAX_ROWS:]:
            if (logits := scores.host_logits(row)) is not None:
                self._table.learn(token, logits)

    def _add_chain(self, tree: DraftTree, root: int, depth: int) -> None:
        """The best successor of each token, up to `depth`, while the path is probable enough."""
        parent, reached = -1, 1.0
        for _ in range(depth):
            best = self._table.successors(root)[:1]
            if not best or reached * best[0][1] < _LEAST_PATH:
                return
            root, share = best[0]
            reached *= share
            parent = tree.add(parent, root, self.name, share)
