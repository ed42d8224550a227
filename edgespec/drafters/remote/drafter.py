"""The drafter over a draft on another machine; `messages` has the protocol.

One unit of work asks the server once and proposes a tree of best tokens, or a drawn chain. While the target verifies,
the server guesses what will be emitted and drafts after that. Where a guess holds, the next draft is here already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Round
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.remote.link import Link, Patience
from edgespec.drafters.remote.messages import MAX_DEPTH, MAX_NODES, Ask, Begin, Drafted
from edgespec.drafters.remote.mirror import Mirror

_ROUNDS = 9  # latest rounds whose time counts
_MAX_UNTOLD = 32  # tokens that the server may lack while it is not asked
_POLL_S = 0.05  # between two looks whether the generation was cancelled


class RemoteDrafter(Drafter):
    """Proposes what a draft server drafts. Where that is slow or gone, it proposes nothing and waits for little."""

    name = "remote"
    block_size = MAX_DEPTH
    runs_ahead = True

    def __init__(self, link: Link, vocab_size: int) -> None:
        """Closes `link` when it is closed. `vocab_size` is the target's."""
        self._link = link
        self._vocab_size = vocab_size
        self._clock = RoundClock(link.draft.patience)
        self._sampling: SamplingParams | None = None
        self._seed = 0
        self._epoch = 0  # of the connection that knows the mirror's text
        self._mirror = Mirror()
        self._number = 0  # of the last message
        self._late = 0  # number of an Ask without a reply, for which nobody waits any more
        self._told = 0  # number of the last Ask of depth 0
        self._announced: Sequence[int] = ()  # a text that a generation will start from

    def announce(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self.is_drawn = draw is not None
        self._sampling = draw.sampling if draw is not None else None
        self._seed = draw.spawn_seed() if draw is not None else 0
        self._announced = text
        self._start(text)

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        if text is not self._announced:
            self.announce(text, draw)
        self._announced = ()
        self._clock.begin()

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        if self._link.epoch != self._epoch:
            self._start(text[:-1])
        if not self._epoch or self._is_late():
            return
        depth, nodes = min(limit.depth, MAX_DEPTH), min(max(limit.depth, limit.nodes), MAX_NODES)
        reach = 0.0 if self.is_drawn else limit.reach  # whether a drawn token comes in time must not depend on it
        cut = self._make_cut(text, depth, reach)
        found = self._link.find(cut)
        self._number += 1
        change = self._mirror.change_to(text)
        self._link.ask(Ask(self._number, change, depth, nodes, reach, found is not None), self._epoch)
        if found is None and (found := self._wait(cut)) is None:
            self._late = self._number
        elif not found.tokens:
            return
        else:
            self._add(tree, found, depth)
        self._clock.leave()
        yield  # where nothing came, the unit has cost its time all the same

    def observe(self, done: Round) -> Sequence[Outcome]:
        self._clock.arrive()
        if self._link.epoch != self._epoch:
            self._start(done.text[:-1])
        elif self._epoch and len(done.text) - len(self._mirror.tokens) > _MAX_UNTOLD and self._has_come(self._told):
            self._told = self._number = self._number + 1
            self._link.send(Ask(self._number, self._mirror.change_to(done.text), 0, 0), self._epoch)
        return ()

    def close(self) -> None:
        self._link.close()

    def _start(self, text: Sequence[int]) -> None:
        """Send the text if there is a connection; a new one knows nothing of it."""
        self._late = self._told = 0
        if self._link.epoch != self._epoch:
            self._epoch, self._mirror = self._link.epoch, Mirror()
        if self._epoch:
            self._number += 1
            message = Begin(self._number, self._mirror.change_to(text), self._sampling, self._seed)
            self._link.send(message, self._epoch)

    def _is_late(self) -> bool:
        """Whether a reply is still to come that was not waited for."""
        if self._has_come(self._late):
            self._late = 0
        return self._late > 0

    def _has_come(self, number: int) -> bool:
        """Whether the server has said something of the message `number`, or of a later one; of 0 it has."""
        return not number or self._link.find(lambda each: each if each.number >= number else None) is not None

    def _make_cut(self, text: Sequence[int], depth: int, reach: float) -> Callable[[Drafted], Drafted | None]:
        """What a draft says after `text`: a reply to the next message, or what was made for the last one.

        What is known already counts if it is half as deep as what is asked for, or ends where it is improbable.
        """
        last, base = self._number, len(self._mirror.tokens)
        emitted = list(text[base:]) if list(text[:base]) == self._mirror.tokens else None

        def cut(draft: Drafted) -> Drafted | None:
            if draft.number > last:
                return draft if draft.number == last + 1 and not draft.is_guess else None
            if draft.number < last or emitted is None:
                return None
            found = draft.after(emitted)
            return found if found is not None and found.is_enough((depth + 1) // 2, reach) else None

        return cut

    def _wait(self, cut: Callable[[Drafted], Drafted | None]) -> Drafted | None:
        """The draft; None if it does not come in time. Raises Cancelled."""
        until = perf_counter() + self._clock.patience_s
        while (left := until - perf_counter()) > 0 and self._link.epoch == self._epoch:
            self._link.check()
            if (found := self._link.wait(cut, min(left, _POLL_S))) is not None:
                return found
        return None

    def _add(self, tree: DraftTree, found: Drafted, depth: int) -> None:
        """Raises ValueError for a draft that is no tree, and for tokens that the target does not have."""
        if not 0 <= min(found.tokens) <= max(found.tokens) < self._vocab_size:
            raise ValueError("the server proposed a token that the target does not have")
        nodes, depths = {-1: -1}, {-1: 0}
        for i, (token, parent) in enumerate(zip(found.tokens, found.parents, strict=True)):
            if parent not in depths:
                raise ValueError("the server sent a draft that is no tree")
            depths[i] = depths[parent] + 1
            if depths[i] > depth:
                continue
            q, confidence = None, found.confidences[i]
            if found.q is not None:
                ids, weights = found.q[i]
                q = np.zeros(self._vocab_size)
                q[ids] = weights / weights.sum(dtype=np.float64)
                confidence = float(q[token])
            nodes[i] = tree.add(nodes[parent], token, self.name, confidence, q)


class RoundClock:
    """How long the target's rounds take, and so how long one may wait for a draft."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since_s = 0.0  # when a draft was handed over, or else the last round ended; 0 before the first
        self._rounds: deque[float] = deque(maxlen=_ROUNDS)

    def begin(self) -> None:
        self._since_s = 0.0

    def leave(self) -> None:
        """The target verifies from now on."""
        self._since_s = perf_counter()

    def arrive(self) -> None:
        """The target has verified."""
        now = perf_counter()
        if self._since_s:
            self._rounds.append(now - self._since_s)
        self._since_s = now

    @property
    def patience_s(self) -> float:
        """Seconds that a round may wait."""
        if not self._rounds:
            return self._patience.most_s
        return min(self._patience.most_s, max(self._patience.least_s, self._patience.steps * median(self._rounds)))
