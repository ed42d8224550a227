"""Prompt lookup decoding (Saxena 2023): drafts the tokens that followed an earlier occurrence of the text's end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Confidence, Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Round

MAX_NGRAM = 5  # n-gram sizes in the index
MAX_MATCH = 64  # tokens; longer matches count as this long
_REACH = 3  # tokens that a chain may propose for each token of the match; more of them are seldom right
_MAX_OCCURRENCES = 8  # most recent occurrences kept for each n-gram


class SuffixLookup:
    """An n-gram index of the text, and the longest earlier match of the text's end.

    end     the position after the match
    length  its number of tokens; 0 without a match
    """

    def __init__(self, min_length: int = 2) -> None:
        """`min_length`: the minimum number of tokens of a match."""
        self._min_length = min_length
        self.tokens: list[int] = []
        self.end = 0
        self.length = 0
        self._ends: dict[tuple[int, ...], deque[int]] = {}  # n-gram -> positions right after it

    def extend(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """Add the tokens that `tokens`, the whole text, has beyond the last call.

        Returns (length of the match, whether it predicted the token) for each new token that followed a match.
        """
        outcomes: list[tuple[int, bool]] = []
        for position in range(len(self.tokens), len(tokens)):
            token = tokens[position]
            right = self.length > 0 and self.tokens[self.end] == token
            if self.length:
                outcomes.append((self.length, right))
            # An n-gram is indexed once a token follows it.
            for n in range(self._min_length, min(MAX_NGRAM, position) + 1):
                gram = tuple(self.tokens[-n:])
                ends = self._ends.get(gram)
                if ends is None:
                    ends = self._ends[gram] = deque(maxlen=_MAX_OCCURRENCES)
                ends.append(position)
            self.tokens.append(token)
            if right:
                self.end, self.length = self.end + 1, min(self.length + 1, MAX_MATCH)
            else:
                self.end, self.length = self._find_longest(self.tokens)
        return outcomes

    def read_continuation(self, end: int, n: int, more: Sequence[int] = ()) -> list[int]:
        """[n] tokens from position `end` of the text and `more`; wraps around where the match overlaps the end."""
        path = self.tokens[end : end + n]
        if len(path) < n:
            path += more
            for i in range(n - len(path)):
                path.append(path[i])
        return path[:n]

    def continue_after(self, more: Sequence[int], n: int) -> tuple[list[int], int]:
        """The continuation if `more` followed the text: ([n] tokens or none, length of the match)."""
        tokens = [*self.tokens[-MAX_MATCH:], *more]
        end, length = self._find_longest(tokens)
        return (self.read_continuation(end, n, more), length) if length else ([], 0)

    def find_matches(self) -> Iterator[tuple[int, int]]:
        """(position after a match of the text's end, size of the n-gram): longest first, then latest first."""
        seen = set()
        for n in range(min(MAX_NGRAM, len(self.tokens)), self._min_length - 1, -1):
            for end in reversed(self._ends.get(tuple(self.tokens[-n:]), ())):
                if end not in seen:
                    seen.add(end)
                    yield end, n

    def _find_longest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(end, length) of the longest match of the end of `tokens` within the text; the latest of equal ones."""
        for n in range(min(MAX_NGRAM, len(tokens)), self._min_length - 1, -1):
            ends = self._ends.get(tuple(tokens[-n:]))
            if ends and n < MAX_NGRAM:
                return ends[-1], n
            if ends:
                length, end = max((self._extend_match(tokens, end, n), end) for end in ends)
                return end, length
        return 0, 0

    def _extend_match(self, tokens: Sequence[int], end: int, known: int) -> int:
        """The number of tokens before `end` that equal the end of `tokens`; at least `known`."""
        n, limit = known, min(MAX_MATCH, len(tokens), end)
        while n < limit and self.tokens[end - n - 1] == tokens[-n - 1]:
            n += 1
        return n


class NgramDrafter(Drafter):
    """Deterministic drafts from the prompt and the output; needs no model.

    It proposes what followed the longest match of the text's end; with a budget for a tree also what followed the other
    matches, longest and latest first. Where others have drafted already, it continues their paths.
    """

    name = "ngram"
    is_free = True
    confidence: Confidence = "length"

    def __init__(self) -> None:
        self._lookup = SuffixLookup(min_length=1)
        self._outcomes: list[Outcome] = []

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        known = self._lookup.tokens
        if list(text[: len(known)]) != known:
            self._lookup = SuffixLookup(min_length=1)
        self._lookup.extend(text)
        self._outcomes = []

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self._read(text)
        others = {source for votes in tree.votes for source in votes} - {self.name} if len(tree) else ()
        if not len(tree) or tree.deepest(self.name) < 0:
            self._add_matches(tree, limit)
        for other in sorted(others):
            self._continue_path(tree, tree.deepest(other), limit.depth)
        yield

    def observe(self, done: Round) -> Sequence[Outcome]:
        self._read(done.text)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _read(self, text: Sequence[int]) -> None:
        self._outcomes += [Outcome(length, is_right) for length, is_right in self._lookup.extend(text)]

    def _add_matches(self, tree: DraftTree, limit: Budget) -> None:
        """What followed the longest match of the text's end; all matches, if the budget is for a tree."""
        lookup = self._lookup
        if limit.nodes <= limit.depth:
            if lookup.length:
                n = min(limit.depth, _REACH * lookup.length + 2)
                tokens = lookup.read_continuation(lookup.end, n)
                tree.add_chain(tokens, self.name, _confidences(lookup.length, len(tokens)))
            return
        for end, length in lookup.find_matches():
            if len(tree) >= limit.nodes:
                return
            tokens = lookup.read_continuation(end, limit.depth)
            tree.add_chain(tokens, self.name, _confidences(length, len(tokens)))

    def _continue_path(self, tree: DraftTree, node: int, depth: int) -> None:
        """What followed the path to `node` in the text."""
        path = tree.path_tokens(node)
        tokens, length = self._lookup.continue_after(path, depth - len(path))
        tree.add_chain(tokens, self.name, _confidences(length, len(tokens)), node)


def _confidences(length: int, n: int) -> list[float]:
    """[n] after a match of `length` tokens, which each looked-up token extends by a half."""
    return [float(length + i // 2) for i in range(n)]
