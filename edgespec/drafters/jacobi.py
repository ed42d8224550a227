"""Jacobi iterations (Santilli et al. 2023; lookahead decoding, Fu et al. 2024): guesses that the target improves.

The tokens to come are guessed. Where a guess is verified, the best token of its row is the next guess at the place
behind it. What any row says of the two tokens before it goes into a pool that drafts as other lookups do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Round
from edgespec.core.scores import Scores
from edgespec.core.tree import DraftTree

_WINDOW = 15  # guessed tokens
_MAX_POOL = 2**16  # pairs of tokens
_MAX_MATCH = 2  # tokens before a guess that its row was right about; more of them count as many
_POOL = _MAX_MATCH + 1  # the kind of a token from the pool; that of a guess is its match
_GUESSES = (0.05, 0.15, 0.3, 0.4)  # at first, how often tokens of a kind are right
_GUESS_WEIGHT = 8.0  # tokens that these count for
_DISCOUNT = 0.99


class _Rates:
    """How often tokens of a kind were right, of late."""

    def __init__(self) -> None:
        self._right = [_GUESS_WEIGHT * each for each in _GUESSES]
        self._n = [_GUESS_WEIGHT] * len(_GUESSES)

    def rate(self, kind: int) -> float:
        return self._right[kind] / self._n[kind]

    def learn(self, kind: int, *, is_right: bool) -> None:
        self._right[kind] = _DISCOUNT * self._right[kind] + is_right
        self._n[kind] = _DISCOUNT * self._n[kind] + 1


class JacobiDrafter(Drafter):
    """Guesses are seldom right, so that they are verified only where rows take next to no time, as on a large GPU."""

    name = "jacobi"
    is_free = pads_batch = True

    def __init__(self) -> None:
        self._rates = _Rates()
        self._pool: dict[tuple[int, int], int] = {}  # two tokens -> the one after them
        self._guesses: list[int] = []  # after the text
        self._kinds: list[int] = []  # of each: the tokens before it that its row was right about

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._rates, self._pool = _Rates(), {}
        self._guesses = list(text[-_WINDOW:])
        self._kinds = [0] * len(self._guesses)

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        found = self._follow_pool(text, min(limit.depth, limit.nodes))
        tree.add_chain(found, self.name, [self._rates.rate(_POOL)] * len(found))
        n = min(limit.depth, limit.nodes, len(self._guesses))
        rates = [self._rates.rate(kind) for kind in range(_POOL)]
        tree.add_chain(self._guesses[:n], self.name, [rates[kind] for kind in self._kinds[:n]])
        yield

    def observe(self, done: Round) -> Sequence[Outcome]:
        if done.scores is None or done.scores.host_logits(0) is None:
            return ()
        rows = self._find_rows(done)
        outcomes = self._compare(done)
        best = self._read(done, done.scores)
        self._renew_guesses(done, [best[row] for row in rows])
        return outcomes

    def _follow_pool(self, text: Sequence[int], n: int) -> list[int]:
        """Up to `n` tokens after the end of `text`, each by the two before it."""
        found = list(text[-2:])
        while len(found) < n + 2 and (token := self._pool.get((found[-2], found[-1]))) is not None:
            found.append(token)
        return found[2:]

    def _compare(self, done: Round) -> list[Outcome]:
        """What the pool has said of the emitted tokens, and the guesses up to the first wrong one."""
        text, n = done.text, len(done.emitted)
        said = [
            (_POOL, self._pool.get((text[i - 2], text[i - 1])), text[i])
            for i in range(max(2, len(text) - n), len(text))
        ]
        for kind, guess, token in zip(self._kinds, self._guesses, done.emitted, strict=False):
            said.append((kind, guess, token))
            if guess != token:
                break
        outcomes = []
        for kind, foretold, token in said:
            if foretold is not None:
                outcomes.append(Outcome(self._rates.rate(kind), foretold == token))
                self._rates.learn(kind, is_right=foretold == token)
        return outcomes

    def _find_rows(self, done: Round) -> list[int]:
        """The rows of the guesses, as far as they were verified."""
        draft = done.draft
        nodes = {
            place: node for node, place in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
        }
        rows: list[int] = []
        node = -1
        for guess in self._guesses:
            node = nodes.get((node, guess), -1)
            if node < 0:
                break
            rows.append(node + 1)
        return rows

    def _read(self, done: Round, scores: Scores) -> list[int]:
        """[rows] the best token of each row; the pool takes them, those of the emitted text last."""
        root = done.text[-len(done.emitted) - 2 : -len(done.emitted)]
        tokens = [root[-1], *done.draft.tokens.tolist()]
        before = [root[0], *(tokens[parent + 1] for parent in done.draft.parents.tolist())]
        best = [int(scores.logits(row).argmax()) for row in range(len(tokens))]
        pool = self._pool
        for pair, token in zip(zip(before, tokens, strict=True), best, strict=True):
            pool[pair] = token
        for i in range(max(2, len(done.text) - len(done.emitted)), len(done.text)):
            pool[done.text[i - 2], done.text[i - 1]] = done.text[i]
        while len(pool) > _MAX_POOL:
            del pool[next(iter(pool))]
        return best

    def _renew_guesses(self, done: Round, improved: Sequence[int]) -> None:
        """The guesses after the text; `improved[i]` is the best token behind the guess i of the last round."""
        text, n, known, kinds = done.text, len(done.emitted), self._guesses, self._kinds
        match = 0
        for guess, token in zip(known, done.emitted, strict=False):
            match = match + 1 if guess == token else 0
        self._guesses, self._kinds = [], []
        for at in range(n, n + _WINDOW):
            if at <= len(improved):
                token, kind = improved[at - 1], min(match, _MAX_MATCH)
            elif at < len(known):
                token, kind = known[at], kinds[at]
            else:
                last = [*text[-2:], *self._guesses][-2:]
                token, kind = self._pool.get((last[0], last[-1]), text[-1 - len(self._guesses) % len(text)]), 0
            match = match + 1 if at < len(known) and known[at] == token else 0
            self._guesses.append(token)
            self._kinds.append(kind)
