"""Suffix decoding (Oliaro et al. 2024): drafts the tokens that followed the text's end in the memory of earlier texts.

The longest match is searched once and then followed token by token: an earlier text matches n + 1 tokens only if it
has matched n. How often such a token is right is learned from every token that is followed, drafted or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Round
from edgespec.drafters.registry import SlotMemory
from edgespec.drafters.suffix_rates import Features, SuffixRates, describe
from edgespec.memory.texts import MAX_MATCH

if TYPE_CHECKING:
    from edgespec.memory.space import MemorySpace

_MAX_PLACES = 8  # places of a match that are followed at a time
_READ = 192  # tokens that are read from a place; after them the memory is searched again
_SHORT_MATCH, _READ_FIRST = 16, 32  # after a shorter match, which mostly goes on for few tokens, so many are read


@dataclass(slots=True, eq=False)
class _Path:
    """What follows the match in one or more earlier texts.

    kind, is_live  of the latest of these places
    at             how many of `tokens` the present text has followed
    n              the number of places that have these tokens
    """

    tokens: list[int]
    kind: str
    is_live: bool
    at: int = 0
    n: int = 1


class _Choice(NamedTuple):
    """A token that may come next, and the paths that have it there."""

    probability: float
    token: int
    features: Features
    paths: list[_Path]


class SuffixDrafter(Drafter):
    """It proposes the most probable continuation, for a tree the most probable nodes; nothing from the present text."""

    name = "suffix"
    is_free = True

    def __init__(self, memory: SlotMemory) -> None:
        self._memory = memory
        self._space: MemorySpace | None = None  # of the present generation
        self._rates = SuffixRates()
        self._paths: list[_Path] = []  # after the match of the text's end, the latest first
        self._length = 0  # tokens of the match
        self._n = 0  # tokens of the text that were followed
        self._n_searched = -1  # likewise, when the memory was last searched
        self._n_read = _READ  # of the places that were found then
        self._next: list[_Choice] | None = None  # what the paths have next; None if it has to be computed
        self._outcomes: list[Outcome] = []

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        space = self._memory.space
        self._space = space if space is not None and space.has_texts else None
        if self._space is not None:
            self._rates = self._space.table("suffix", SuffixRates.load)
        self._paths, self._next, self._outcomes = [], None, []
        self._length, self._n, self._n_searched = 0, len(text), -1

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self._follow(text)
        n = self._n_read  # of paths with so many tokens the earlier text may go on
        is_short = any(len(path.tokens) == n and n - path.at < limit.depth for path in self._paths)
        if is_short or not self._paths:
            self._search(text)
        if limit.nodes > limit.depth:
            tree.add_most_probable(self.name, limit, self._follow_all, self._paths)
        elif self._paths:
            yield from self._add_chain(tree, limit.depth)
        yield

    def observe(self, done: Round) -> Sequence[Outcome]:
        self._follow(done.text)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _follow(self, text: Sequence[int]) -> None:
        """Learn from the tokens that `text` has beyond the last call; keep the paths that have them too."""
        learn = self._rates.learn
        for position in range(self._n, len(text)):
            if not self._paths:
                break
            token, kept = text[position], []
            for choice in self._choose_next():
                is_right = choice.token == token
                self._outcomes.append(Outcome(choice.probability, is_right))
                learn(choice.features, choice.probability, is_right)
                if is_right:
                    kept = choice.paths
            for path in kept:
                path.at += 1
            self._paths, self._next = [path for path in kept if path.at < len(path.tokens)], None
            self._length = self._length + 1 if kept else 0
        self._n = len(text)

    def _search(self, text: Sequence[int]) -> None:
        """Find the paths after the longest match of the end of `text`."""
        if self._space is None or self._n_searched == self._n:
            return
        self._n_searched = self._n
        matches = self._space.find(text, _MAX_PLACES)
        found = matches.length if matches is not None else 0
        self._n_read = _READ if found >= _SHORT_MATCH else _READ_FIRST
        paths: dict[tuple[int, ...], _Path] = {}
        for place in matches.places if matches is not None else ():
            tokens = place.read(self._n_read)
            key = tuple(tokens)
            if key in paths:
                paths[key].n += 1
            elif tokens:
                paths[key] = _Path(tokens, place.kind, place.is_live)
        self._paths, self._next = list(paths.values()), None
        self._length = max(self._length, found) if found == MAX_MATCH else found

    def _choose_next(self) -> list[_Choice]:
        if self._next is None:
            self._next = self._choose(self._paths, 0)
        return self._next

    def _choose(self, paths: list[_Path], ahead: int) -> list[_Choice]:
        """The tokens that `paths` have `ahead` of the next one, the most probable first; none where they end."""
        length, rates = self._length + ahead, self._rates
        if len(paths) == 1:
            path = paths[0]
            if (at := path.at + ahead) >= len(path.tokens):
                return []
            features = describe(length, path.n, path.n, path.kind, is_live=path.is_live)
            return [_Choice(rates.rate(features), path.tokens[at], features, paths)]
        by_token: dict[int, list[_Path]] = {}
        n = 0
        for path in paths:
            if (at := path.at + ahead) < len(path.tokens):
                by_token.setdefault(path.tokens[at], []).append(path)
                n += path.n
        choices, is_latest = [], True
        for token, those in by_token.items():
            latest, n_agreeing = those[0], sum(path.n for path in those)
            features = describe(length, n_agreeing, n, latest.kind, is_live=latest.is_live, is_latest=is_latest)
            choices.append(_Choice(rates.rate(features), token, features, those))
            is_latest = False
        return sorted(choices, key=lambda choice: -choice.probability)

    def _add_chain(self, tree: DraftTree, depth: int) -> Iterator[None]:
        """Add the most probable path; the caller may stop after its first token."""
        first = self._choose_next()[0]
        node, paths = tree.add(-1, first.token, self.name, first.probability), first.paths
        yield
        for ahead in range(1, depth):
            choices = self._choose(paths, ahead)
            if not choices:
                return
            probability, token, features, paths = choices[0]
            if len(paths) == 1:
                start, length = paths[0].at + ahead, self._length + ahead
                tokens = paths[0].tokens[start : start + depth - ahead]
                tree.add_chain(tokens, self.name, self._rates.rate_all(features, length, len(tokens)), node)
                return
            node = tree.add(node, token, self.name, probability)

    def _follow_all(self, paths: list[_Path], ahead: int) -> list[tuple[int, float, list[_Path]]]:
        """(token, its probability, the paths that have it)"""
        return [(each.token, each.probability, each.paths) for each in self._choose(paths, ahead)]
