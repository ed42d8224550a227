"""What a target will probably emit in the round that verifies a draft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from edgespec.core.draft_tree import DraftTree
from edgespec.drafters.remote.messages import Drafted

_MIN_PROBABILITY = 0.03  # of what is guessed: a guess under way delays the next message by one forward
_SIBLINGS = 3  # of a drawn token, that are guessed at most
_FIRST_RATE, _FIRST_WEIGHT = 0.6, 4.0  # of accepted tokens, before any is known
_DISCOUNT = 0.97  # of earlier tokens, at every new one


def list_path(draft: Drafted) -> list[int]:
    """The nodes of the most probable child of the root, of its most probable child, and so on."""
    path, last = [], -1
    while children := [node for node, parent in enumerate(draft.parents) if parent == last]:
        last = max(children, key=lambda node: (draft.confidences[node], -node))
        path.append(last)
    return path


def list_candidates(tree: DraftTree) -> list[tuple[int, float]]:
    """(token, probability) of what may follow the root of a draft of one token, the most probable first."""
    if len(tree) and (q := tree.q[0]) is not None:
        found = [(int(token), float(q[token])) for token in np.argsort(-q)[:_SIBLINGS]]
    else:
        found = [(token, max(votes.values())) for token, votes in zip(tree.tokens, tree.votes, strict=True)]
    return found


def rank_guesses(
    draft: Drafted, path: Sequence[int], after: Sequence[tuple[int, float]], rate: float
) -> list[tuple[int, ...]]:
    """What the target may emit in the round that verifies `draft`, the most probable first.

    `after` are candidates after the whole `path`. The target accepts the path up to a token, in whose place it emits
    another candidate of the draft; or all of it, and emits one of `after`. It accepts each token at `rate`: a draft's
    own probability of its best token is another one. Those of the others say how the rest is shared.
    """
    found: list[tuple[float, tuple[int, ...]]] = []
    reached, tokens, parent = 1.0, [draft.tokens[node] for node in path], -1

    def add(others: Iterable[tuple[int, float]], depth: int, best: float) -> None:
        for token, probability in others:
            share = min(1.0, probability / max(1.0 - best, 1e-9))
            found.append((reached * (1.0 - rate) * share, (*tokens[:depth], token)))

    for depth, node in enumerate(path):
        add(_list_others(draft, node, parent), depth, draft.confidences[node])
        reached, parent = reached * rate, node
    if after:
        found.append((reached * rate, (*tokens, after[0][0])))
        add(after[1:], len(path), after[0][1])
    likely = sorted((each for each in found if each[0] >= _MIN_PROBABILITY), key=lambda each: -each[0])
    return [emitted for _, emitted in likely]


class AcceptanceRate:
    """The share of tokens on the paths of drafts that the target has accepted, those after a rejection not counted."""

    def __init__(self) -> None:
        self._accepted, self._tested = _FIRST_RATE * _FIRST_WEIGHT, _FIRST_WEIGHT

    @property
    def value(self) -> float:
        return self._accepted / self._tested

    def observe(self, draft: Drafted, emitted: Sequence[int]) -> None:
        """The target has emitted these in the round that verified `draft`."""
        for node, token in zip(list_path(draft), emitted, strict=False):
            is_accepted = draft.tokens[node] == token
            self._accepted = self._accepted * _DISCOUNT + is_accepted
            self._tested = self._tested * _DISCOUNT + 1.0
            if not is_accepted:
                return


def _list_others(draft: Drafted, node: int, parent: int) -> Iterator[tuple[int, float]]:
    """(token, probability) of what may be emitted in the place of `node`."""
    if draft.q is not None:
        ids, q = draft.q[node]
        for at in np.argsort(-q)[:_SIBLINGS]:
            if ids[at] != draft.tokens[node]:
                yield int(ids[at]), float(q[at])
        return
    for other, above in enumerate(draft.parents):
        if above == parent and other != node:
            yield draft.tokens[other], draft.confidences[other]


def describe_tree(number: int, emitted: Sequence[int], tree: DraftTree, source: str, *, is_guess: bool) -> Drafted:
    """What `source` has drafted after the text and `emitted`."""
    q = None
    if len(tree) and tree.q[0] is not None:
        q = [(np.flatnonzero(each).astype(np.int32), each[each != 0]) for each in tree.q if each is not None]
    confidences = [votes[source] for votes in tree.votes]
    return Drafted(number, tuple(emitted), list(tree.tokens), list(tree.parents), confidences, q, is_guess)
