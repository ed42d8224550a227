"""A drafter for edgespec: what followed the longest earlier occurrence of the text's end, of any length.

The occurrence is found by a suffix automaton (Blumer et al. 1985), in constant time per token on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Confidence, Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Round
from edgespec.drafters import DrafterSpec, SlotResources


class SuffixAutomaton:
    """The suffix automaton of a text that grows, and the longest suffix of the text that occurs earlier in it.

    tokens  the text
    length  of that suffix; 0 without one
    end     the position after an earlier occurrence of it
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.length = 0
        self.end = 0
        # By state: transitions, suffix link, length of the longest string, position after one of its occurrences.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._last = 0  # the state of the whole text

    def append(self, token: int) -> None:
        self.tokens.append(token)
        new = self._add_state({}, -1, len(self.tokens), len(self.tokens))
        state, self._last = self._last, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._split(state, token)
        # Strings of the linked state end the text and occur elsewhere; no longer one does.
        match = self._link[new]
        self.length, self.end = self._length[match], self._end[match]
        self._end[match] = len(self.tokens)  # the next match of this state is the latest one

    def read_continuation(self, n: int) -> list[int]:
        """[n] tokens after the match; repeats them where the match overlaps the end of the text."""
        found: list[int] = []
        for at in range(self.end, self.end + n):
            found.append(self.tokens[at] if at < len(self.tokens) else found[at - len(self.tokens)])
        return found

    def _split(self, state: int, token: int) -> int:
        """The state of the longest string of `state` followed by `token`; a new one if the present one has longer."""
        target, length = self._next[state][token], self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._add_state(dict(self._next[target]), self._link[target], length, self._end[target])
        self._link[target] = clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add_state(self, transitions: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(transitions)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class AutomatonDrafter(Drafter):
    """Proposes a chain, with the length of the match as confidence."""

    name = "automaton"
    is_free = True
    confidence: Confidence = "length"

    def __init__(self) -> None:
        self._text = SuffixAutomaton()
        self._outcomes: list[Outcome] = []

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        known = self._text.tokens
        if list(text[: len(known)]) != known:
            self._text = SuffixAutomaton()
        self._read(text)
        self._outcomes = []

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self._read(text)
        if self._text.length:
            length, tokens = self._text.length, self._text.read_continuation(limit.depth)
            tree.add_chain(tokens, self.name, [float(length + i) for i in range(len(tokens))])
        yield

    def observe(self, done: Round) -> Sequence[Outcome]:
        self._read(done.text)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _read(self, text: Sequence[int]) -> None:
        """Add the tokens of `text` that are new, and compare each with what the match before it predicted."""
        known = self._text
        for token in text[len(known.tokens) :]:
            if known.length:
                self._outcomes.append(Outcome(known.length, known.tokens[known.end] == token))
            known.append(token)


def open_drafter(resources: SlotResources) -> AutomatonDrafter:
    """It needs nothing of the slot."""
    return AutomatonDrafter()


SPEC = DrafterSpec("automaton", "what followed the longest earlier occurrence of the text's end", open_drafter)
