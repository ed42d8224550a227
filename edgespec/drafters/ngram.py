"""Prompt lookup decoding (Saxena 2023): drafts the tokens that followed an earlier occurrence of the text's end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import MATCH_GROWTH, Confidence, Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Round

if TYPE_CHECKING:
    from edgespec.drafters.registry import SlotMemory

MAX_NGRAM = 5  # n-grams of 1 to 5 tokens are in the index
MAX_MATCH = 64  # tokens; longer matches count as this long
_PART = 8  # tokens of a chain that are added at a time, after the first one
_MAX_OCCURRENCES = 8  # most recent occurrences kept for each n-gram


class SuffixLookup:
    """An n-gram index of the text, and the longest earlier match of the text's end.

    end     the position after the match
    length  its number of tokens; 0 without a match
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end = 0
        self.length = 0
        # An n-gram is indexed once a token follows it.
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> position right after its latest occurrence
        self._earlier: list[dict[int, int]] = [{} for _ in range(MAX_NGRAM)]  # such a position -> the one before
        self._grams: list[tuple[int, ...]] = []  # at the text's end, the shortest first

    def read(self, tokens: Sequence[int]) -> None:
        """Add the tokens that `tokens`, the whole text, has beyond the last call, and look its end up anew."""
        start = len(self.tokens)
        self.tokens += tokens[start:]
        latest = self._latest
        for n, earlier in enumerate(self._earlier, 1):
            first = max(start, n)
            columns = [self.tokens[first - n + i : len(self.tokens) - n + i] for i in range(n)]
            for end, gram in enumerate(zip(*columns, strict=False), first):  # to the shortest, in a text of few tokens
                before = latest.get(gram)
                if before is not None:
                    earlier[end] = before
                latest[gram] = end
        self._grams = self._list_grams(self.tokens)
        self.end, self.length = self._find_longest(self.tokens, self._grams)

    def extend(self, tokens: Sequence[int]) -> list[Outcome]:
        """Add what `tokens` has beyond the last call, following the match; returns what it predicted of each token."""
        outcomes: list[Outcome] = []
        known, latest = self.tokens, self._latest
        for position in range(len(known), len(tokens)):
            token = tokens[position]
            is_right = self.length > 0 and known[self.end] == token
            if self.length:
                outcomes.append(Outcome(self.length, is_right))
            for gram, earlier in zip(self._grams, self._earlier, strict=False):
                before = latest.get(gram)
                if before is not None:
                    earlier[position] = before
                latest[gram] = position
            known.append(token)
            self._grams = self._list_grams(known)
            if is_right:
                self.end, self.length = self.end + 1, min(self.length + 1, MAX_MATCH)
            else:
                self.end, self.length = self._find_longest(known, self._grams)
        return outcomes

    def continue_after(self, more: Sequence[int], n: int) -> tuple[list[int], int]:
        """The continuation if `more` followed the text: ([n] tokens or none, length of the match)."""
        tokens = [*self.tokens[-MAX_MATCH:], *more]
        end, length = self._find_longest(tokens, self._list_grams(tokens))
        return (continue_from(self.tokens, end, n, more), length) if length else ([], 0)

    def find_matches(self) -> Iterator[tuple[int, int]]:
        """(position after a match of the text's end, size of the n-gram): longest first, then latest first."""
        seen = set()
        for gram in reversed(self._grams):
            for end in self._list_ends(gram):
                if end not in seen:
                    seen.add(end)
                    yield end, len(gram)

    def _list_grams(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The n-grams at the end of `tokens`, the shortest first."""
        tail = tuple(tokens[-MAX_NGRAM:])
        return [tail[-n:] for n in range(1, len(tail) + 1)]

    def _list_ends(self, gram: tuple[int, ...]) -> list[int]:
        """The positions after the latest occurrences of `gram`, the latest first."""
        found: list[int] = []
        end, earlier = self._latest.get(gram), self._earlier[len(gram) - 1]
        while end is not None and len(found) < _MAX_OCCURRENCES:
            found.append(end)
            end = earlier.get(end)
        return found

    def _find_longest(self, tokens: Sequence[int], grams: Sequence[tuple[int, ...]]) -> tuple[int, int]:
        """(end, length) of the longest match of the end of `tokens`, with n-grams `grams`; the latest of equal ones."""
        for gram in reversed(grams):
            end = self._latest.get(gram)
            if end is not None and len(gram) < MAX_NGRAM:
                return end, len(gram)
            if end is not None:
                ends = self._list_ends(gram)
                length, end = max((count_common(self.tokens, each, tokens, MAX_NGRAM), each) for each in ends)
                return end, length
        return 0, 0


def count_common(tokens: Sequence[int], end: int, suffix: Sequence[int], known: int) -> int:
    """The number of `tokens` before `end` that equal the end of `suffix`; at least `known`."""
    n, limit = known, min(MAX_MATCH, len(suffix), end)
    while n < limit and tokens[end - n - 1] == suffix[-n - 1]:
        n += 1
    return n


def continue_from(tokens: list[int], end: int, n: int, more: Sequence[int] = ()) -> list[int]:
    """[n] tokens from position `end` of `tokens` and `more`; if these are fewer than `n`, they are repeated."""
    path = tokens[end : end + n]
    if len(path) < n:
        path += more
        for i in range(n - len(path)):
            path.append(path[i])
    return path[:n]


_QUOTED = 4  # tokens of a match in quotes at least


class Quotes:
    """An index of what tools have said, as a call would quote it, in which the end of a text is looked up."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> position right after its latest occurrence

    def read(self, tokens: Sequence[int]) -> None:
        """Index `tokens`, only what is new if they begin with those of the last call."""
        known = len(self._tokens)
        if known > len(tokens) or list(tokens[:known]) != self._tokens:
            self._tokens, self._latest, known = [], {}, 0
        self._tokens += tokens[known:]
        start = max(0, known - _QUOTED)
        columns = [self._tokens[start + i :] for i in range(_QUOTED)]
        self._latest.update(zip(zip(*columns, strict=False), range(start + _QUOTED, len(self._tokens)), strict=False))

    def continue_text(self, text: Sequence[int], n: int) -> tuple[list[int], int]:
        """What followed the latest match of the end of `text`: ([n] tokens or fewer, length of the match)."""
        end = self._latest.get(tuple(text[-_QUOTED:]))
        if end is None:
            return [], 0
        return self._tokens[end : end + n], count_common(self._tokens, end, text[-MAX_MATCH:], _QUOTED)


class NgramDrafter(Drafter):
    """Deterministic drafts from the prompt and the output; needs no model.

    It proposes what followed the longest match of the text's end, in the text or in quotes of it; with a budget for a
    tree what followed the other matches in the text too, longest and latest first. If others have drafted already,
    it continues their paths.
    """

    name = "ngram"
    is_free = True
    confidence: Confidence = "length"

    def __init__(self, memory: SlotMemory | None = None) -> None:
        self._memory = memory
        self._quotes = Quotes()
        self._lookup = SuffixLookup()
        self._is_indexed = False  # whether the lookup has read this text's prompt
        self._n_prompt = 0
        self._expected: tuple[int, int, int] | None = None  # position, length of the match, and token of a quote
        self._outcomes: list[Outcome] = []

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._n_prompt, self._is_indexed, self._outcomes, self._expected = len(text), False, [], None

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self._read(text)
        others = {source for votes in tree.votes for source in votes} - {self.name} if len(tree) else ()
        if not len(tree) or tree.deepest(self.name) < 0:
            yield from self._add_matches(tree, text, limit)
        for other in sorted(others):
            node = tree.deepest(other)
            path = tree.path_tokens(node)
            tokens, length = self._lookup.continue_after(path, limit.depth - len(path))
            tree.add_chain(tokens, self.name, _confidences(length, len(tokens)), node)
        yield

    def observe(self, done: Round) -> Sequence[Outcome]:
        self._read(done.text)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _read(self, text: Sequence[int]) -> None:
        """Extend the index to `text`, and keep what its matches predicted."""
        lookup = self._lookup
        if not self._is_indexed:
            if len(lookup.tokens) > self._n_prompt or list(text[: len(lookup.tokens)]) != lookup.tokens:
                lookup = self._lookup = SuffixLookup()
            lookup.read(text[: self._n_prompt])
            self._quotes.read(self._memory.quotes() if self._memory is not None else ())
            self._is_indexed = True
        if self._expected is not None and self._expected[0] < len(text):
            at, length, token = self._expected
            self._outcomes.append(Outcome(length, text[at] == token))
            self._expected = None
        if len(text) > len(lookup.tokens):
            self._outcomes += lookup.extend(text)

    def _add_matches(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        """Add what followed the longest match, in parts between which the caller may stop; for a tree, all matches."""
        lookup = self._lookup
        if limit.nodes <= limit.depth:
            quoted, length = self._quotes.continue_text(text, limit.depth)
            node, n = -1, limit.depth if lookup.length else 0
            if quoted and length > lookup.length:
                tokens, n = quoted, len(quoted)
                self._expected = len(text), length, quoted[0]
            else:
                tokens, length = continue_from(lookup.tokens, lookup.end, n), lookup.length
            confidences = _confidences(length, n)
            for start, end in pairwise((0, *range(1, n, _PART), n) if n else ()):
                node = tree.add_chain(tokens[start:end], self.name, confidences[start:end], node)
                if end < n:
                    yield
            return
        before = len(tree)  # of others, which may have proposed more than will be verified
        for end, length in lookup.find_matches():
            if len(tree) - before >= limit.nodes:
                return
            tokens = continue_from(lookup.tokens, end, limit.depth)
            tree.add_chain(tokens, self.name, _confidences(length, len(tokens)))


def _confidences(length: int, n: int) -> list[float]:
    """[n] the confidences, as lengths, in tokens that are drafted after a match of `length` tokens."""
    return [length + MATCH_GROWTH * i for i in range(n)]
