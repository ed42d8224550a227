"""Measure the agreement and cost of a draft session on a fixed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.controller.cost_model import Profile, choose_chain_length
from edgespec.controller.profiler import measure_drafter, measure_rows
from edgespec.core.arrays import Ints
from edgespec.core.greedy import read_prompt
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter

_ROWS = 64  # compared positions
_PROFILE_S = 1.0


@dataclass(frozen=True, slots=True)
class DraftEval:
    """The measurement of one draft.

    agreement  share of positions at which the draft's most probable token is the target's
    cost       time of a draft token, in plain steps
    length     the fastest chain length if each draft token is accepted with `agreement`; 0 if none pays
    speedup    of that chain over plain decoding
    """

    agreement: float
    cost: float
    length: int
    speedup: float

    def __str__(self) -> str:
        return f"{self.agreement:.0%} agreement, a draft token costs {self.cost:.2f} plain steps"


class Evaluator:
    """Compares drafts with a target on a given text. Agreement on text by the target itself is mostly higher."""

    def __init__(self, target: Session, tokens: Sequence[int], check: CheckCancelled) -> None:
        """Raises Cancelled, BackendError; ValueError for a text of fewer than 8 tokens."""
        size = min(len(tokens), target.capabilities.context_size)
        rows = min(_ROWS, size // 2)
        if rows < 4:
            raise ValueError("the text is too short")
        self._target = target
        self._start = size - rows
        self._text = list(tokens[:size])
        self._check = check
        self.profile = Profile(measure_rows(target, _PROFILE_S, check))
        self._choices = self._argmax(target)

    def evaluate(self, draft: Session) -> DraftEval:
        """Compare `draft`, which may share the target's KV cache. Raises Cancelled, BackendError."""
        before = self._text[: self._start]
        read_prompt(self._target, before)
        agreed = float((self._argmax(draft) == self._choices).mean())
        drafter = SequentialDrafter("draft", ModelDraftSession(draft, self._target.capabilities.vocab_size))
        cost = measure_drafter(drafter, self._text[: self._start + 1], self._check)
        draft_s = cost.seconds(1) if cost is not None else float("inf")
        length, speedup = choose_chain_length(self.profile.rows, draft_s, agreed)
        return DraftEval(agreed, draft_s / self.profile.rows[1], length, speedup)

    def _argmax(self, session: Session) -> Ints:
        """[rows] the most probable tokens at the last positions of the text."""
        read_prompt(session, self._text[: self._start])
        best: list[Ints] = []
        at = self._start
        while at < len(self._text):
            self._check()
            n = min(len(self._text) - at, session.draft_limit + 1)
            chain = Draft.chain(self._text[at + 1 : at + n])
            best.append(session.forward(self._text[at], chain).argmax())
            session.commit(range(n - 1))
            at += n
        session.rewind(self._start)
        return np.concatenate(best)
