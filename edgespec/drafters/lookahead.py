"""Lookahead decoding (Fu et al. 2024, arXiv:2402.02057): drafts n-grams that the target makes of its own guesses.

A window of W columns lies behind the text. Column i guesses the N - 1 tokens from place i on, where place 0 is that of
the text's last token, the root. In the draft the first tokens of all columns form a chain, and the others of a column
form a branch below its first. What the target says after the last token of a column completes an n-gram of N tokens for
the pool, and the column moves on by one place: it drops its first token and ends with that one. Beside the window the
draft has the last G n-grams of the pool that begin with the root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import MAX_TREE, Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Draft, Round
from edgespec.core.scores import Scores
from edgespec.errors import InvalidRequest

_FIRST, _NEXT, _GUESS = 0.3, 0.6, 0.01  # how often tokens are right: an n-gram's second, its later ones, the window's
_MISSING = -2  # a node that was not scored
_EXAMPLE = "Write W,N,G as in lookahead:7,5,7."


@dataclass(frozen=True, slots=True)
class WindowShape:
    """The size of a round. Raises InvalidRequest if there is no such window, or its draft is too large.

    columns   W, the places that are guessed; the first is the root's
    gram      N, the tokens of an n-gram
    branches  G, the n-grams that are verified in a round, at most
    """

    columns: int = 7
    gram: int = 5
    branches: int = 7

    def __post_init__(self) -> None:
        for letter, value, least in (("W", self.columns, 1), ("N", self.gram, 2), ("G", self.branches, 1)):
            if value < least:
                raise InvalidRequest(f"{letter} of lookahead must be at least {least}, not {value}.", hint=_EXAMPLE)
        if self.nodes > MAX_TREE:
            raise InvalidRequest(
                f"{self} drafts up to {self.nodes:,} tokens a round, and a draft has {MAX_TREE} at most.", hint=_EXAMPLE
            )

    def __str__(self) -> str:
        return f"lookahead:{self.columns},{self.gram},{self.branches}"

    @property
    def window_nodes(self) -> int:
        """Nodes of the window: the chain without the root, and a branch for each column."""
        return self.columns - 1 + self.columns * (self.gram - 2)

    @property
    def window_depth(self) -> int:
        return self.columns - 1 + self.gram - 2

    @property
    def nodes(self) -> int:
        """Nodes of a draft, at most."""
        return self.window_nodes + self.branches * (self.gram - 1)

    @property
    def depth(self) -> int:
        return max(self.window_depth, self.gram - 1)


def parse_shape(text: str) -> WindowShape:
    """ "7,5,7" is W,N,G. Raises InvalidRequest."""
    if not re.fullmatch(r"\d{1,4},\d{1,4},\d{1,4}", text, re.ASCII):
        raise InvalidRequest(f"lookahead takes three numbers, not '{text}'.", hint=_EXAMPLE)
    return WindowShape(*map(int, text.split(",")))


class NgramPool:
    """Keeps the last n-grams that began with a token, `most` of each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> the others, the oldest first

    def add(self, gram: Sequence[int]) -> None:
        known = self._grams.setdefault(gram[0], {})
        rest = tuple(gram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def find(self, first: int) -> list[tuple[int, ...]]:
        """The n-grams that begin with `first`, without it; the last one first."""
        return [*reversed(self._grams.get(first, {}))]


class LookaheadDrafter(Drafter):
    """Drafts the window, and n-grams of the pool, which the n-grams of the text are in too.

    If the budget is for a chain, only the last n-gram is drafted. The window moves in rounds that have scored all of
    it, whoever drafted them.
    """

    name = "lookahead"
    is_free = pads_batch = True

    def __init__(self, shape: WindowShape | None = None) -> None:
        self._shape = shape or WindowShape()
        self.whole_size = Budget(self._shape.depth, self._shape.nodes)
        self._text: list[int] = []  # whose n-grams the pool has
        self._pool = NgramPool(self._shape.branches)
        self._columns: list[list[int]] = []  # [W, N - 1]; the first token of the first column is at the root's place

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        columns, size = self._shape.columns, self._shape.gram - 1
        if list(text[: len(self._text)]) != self._text:
            self._text, self._pool = [], NgramPool(self._shape.branches)
        guesses = [text[-1 - at % len(text)] for at in range(columns * size)]
        self._columns = [guesses[at::columns] for at in range(columns)]

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self._read(text, len(text))
        shape, is_chain = self._shape, limit.nodes <= limit.depth
        length = min(shape.gram - 1, limit.depth, limit.nodes)
        has_window = not is_chain and limit.depth >= shape.window_depth and limit.nodes >= shape.window_nodes
        room = limit.nodes - shape.window_nodes if has_window else limit.nodes
        for gram in self._pool.find(text[-1])[: 1 if is_chain else room // length]:
            tree.add_chain(gram[:length], self.name, self._confidences[:length])
        if has_window:
            self._add_window(tree)
        yield

    def observe(self, done: Round) -> Sequence[Outcome]:
        self._read(done.text, len(done.text) - len(done.emitted))
        outcomes = self._compare(done)
        if done.scores is not None:
            self._move(done, done.scores)
        self._read(done.text, len(done.text))
        return outcomes

    @property
    def _confidences(self) -> list[float]:
        """[N - 1] the confidences in the tokens of an n-gram behind its first."""
        return [_FIRST, *[_NEXT] * (self._shape.gram - 2)]

    def _read(self, text: Sequence[int], end: int) -> None:
        """The pool takes the n-grams of `text` up to position `end` that it does not have yet."""
        size, known = self._shape.gram, len(self._text)
        self._text += text[known:end]
        for at in range(max(0, known - size + 1), len(self._text) - size + 1):
            self._pool.add(self._text[at : at + size])

    def _add_window(self, tree: DraftTree) -> None:
        """The chain through the columns, and the branch of each."""
        place = -1
        for i, (first, *others) in enumerate(self._columns):
            if i:
                place = tree.add(place, first, self.name, _GUESS)
            tree.add_chain(others, self.name, [_GUESS] * len(others), place)

    def _compare(self, done: Round) -> list[Outcome]:
        """The outcomes of the pool's n-grams at the emitted tokens, of each n-gram up to its first wrong token."""
        text, outcomes = done.text, list[Outcome]()
        at = len(text) - len(done.emitted)
        while at < len(text):
            found = self._pool.find(text[at - 1])
            before = at
            for token, confidence in zip(found[0] if found else (), self._confidences, strict=False):
                outcomes.append(Outcome(confidence, token == text[at]))
                at += 1
                if at == len(text) or not outcomes[-1].is_right:
                    break
            at = max(at, before + 1)
        return outcomes

    def _move(self, done: Round, scores: Scores) -> None:
        """If the whole window was scored, the pool takes its n-grams, and each column moves on by one place."""
        rows = self._find_rows(done.draft)
        if min(rows) < 0:
            return
        self._columns[0][0] = done.text[-len(done.emitted) - 1]
        for column, token in zip(self._columns, _choose_best(scores, rows), strict=True):
            column.append(token)
            self._pool.add(column)
            del column[0]

    def _find_rows(self, draft: Draft) -> list[int]:
        """[W] the row of each column's last token; negative if it was not scored."""
        edges = zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)
        nodes = {edge: node for node, edge in enumerate(edges)}
        rows, place = [], -1
        for i, (first, *others) in enumerate(self._columns):
            if i:
                place = nodes.get((place, first), _MISSING)
            node = place
            for token in others:
                node = nodes.get((node, token), _MISSING)
            rows.append(node + 1)
        return rows


def _choose_best(scores: Scores, rows: Sequence[int]) -> list[int]:
    """The best token of each row. Rows on a device stay there."""
    if scores.host_logits(0) is None:
        best = scores.argmax().tolist()
        return [best[row] for row in rows]
    return [int(scores.logits(row).argmax()) for row in rows]
