"""How well and how fast a draft session serves a target, tried on a text before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.controller.cost_model import Profile, choose_chain_length
from edgespec.controller.profiler import measure, measure_draft
from edgespec.core.arrays import Ints
from edgespec.core.greedy import read_prompt
from edgespec.core.protocols import CheckCancelled, Draft, Session

_ROWS = 64  # positions at which choices are compared
_MEASURED_S = 1.0


@dataclass(frozen=True, slots=True)
class DraftEval:
    """Of one draft.

    agreement  share of positions at which it would choose the target's token
    cost       of a drafted token, in plain steps
    length     of the chain that would be the fastest if every drafted token were right that often; 0: none pays
    speedup    of that chain, over plain decoding
    """

    agreement: float
    cost: float
    length: int
    speedup: float

    def __str__(self) -> str:
        return f"{self.agreement:.0%} agreement, a drafted token costs {self.cost:.2f} of a plain step"


class Evaluator:
    """What a target chooses along a text. It is not its own text, of which a draft mostly foretells more."""

    def __init__(self, target: Session, tokens: Sequence[int], check: CheckCancelled) -> None:
        """Raises Cancelled, BackendError; ValueError for a text of fewer than 8 tokens."""
        size = min(len(tokens), target.capabilities.context_size)
        rows = min(_ROWS, size // 2)
        if rows < 4:
            raise ValueError("the text is too short to compare choices on")
        self._target = target
        self._start = size - rows
        self._text = list(tokens[:size])
        self._check = check
        self.profile: Profile = measure(target, None, _MEASURED_S, check)
        self._choices = self._chosen(target)

    def trial(self, draft: Session, *, slows: bool = False) -> DraftEval:
        """`draft` held against the target, which it may follow, and which it may have slowed down.

        Raises Cancelled, BackendError.
        """
        before = self._text[: self._start]
        read_prompt(self._target, before)
        agreed = float((self._chosen(draft) == self._choices).mean())
        draft_s, _ = measure_draft(draft, self._text, self._start, self._check)
        length, speedup = choose_chain_length(self.profile.rows, draft_s, agreed)
        plain_s = self.profile.rows[1]
        if slows:
            now_s, _ = measure_draft(self._target, self._text, self._start, self._check)
            speedup *= min(1.0, plain_s / now_s)
        return DraftEval(agreed, draft_s / plain_s, length, speedup)

    def _chosen(self, session: Session) -> Ints:
        """[rows] the best tokens after the last positions of the text; a few at a time where a draft is limited."""
        read_prompt(session, self._text[: self._start])
        found: list[Ints] = []
        at = self._start
        while at < len(self._text):
            self._check()
            n = min(len(self._text) - at, session.draft_limit + 1)
            chain = Draft.chain(self._text[at + 1 : at + n])
            found.append(session.forward(self._text[at], chain).argmax())
            session.commit(range(n - 1))
            at += n
        session.rewind(self._start)
        return np.concatenate(found)
