"""The agreement and cost of a draft session on given texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.autopilot.profile import Profile, choose_chain_length
from edgespec.autopilot.profiler import measure_drafter, measure_rows
from edgespec.cancel import check_cancelled
from edgespec.core.arrays import Ints
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT, Session
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from edgespec.engine.head_probe import read_choices

_ROWS = 64  # compared positions
_PROFILE_S = 1.0
_PLAIN_STEPS = 8


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


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of which the choices after each token from position `start` on are compared."""

    text: Sequence[int]
    start: int

    @staticmethod
    def end_of(tokens: Sequence[int], context_size: int) -> Passage:
        """The last positions of a text. Raises ValueError for one of fewer than 8 tokens."""
        size = min(len(tokens), context_size)
        rows = min(_ROWS, size // 2)
        if rows < 4:
            raise ValueError("the text is too short")
        return Passage(tokens[:size], size - rows)


class Evaluator:
    """Compares drafts with a target on given texts. Agreement on texts by the target itself is mostly higher."""

    def __init__(self, target: Session, passages: Sequence[Passage]) -> None:
        """Raises Cancelled, BackendError."""
        self._target = target
        self._passages = passages
        self.profile = Profile(measure_rows(target, _PROFILE_S))
        self._choices = np.concatenate([self._argmax(target, each) for each in passages])

    def evaluate(self, draft: Session) -> DraftEval:
        """Compare `draft`, which may share the target's KV cache. Raises Cancelled, BackendError."""
        choices = []
        for each in self._passages:
            read_prompt(self._target, each.text[: each.start])
            choices.append(self._argmax(draft, each))
        agreed = float((np.concatenate(choices) == self._choices).mean())
        drafter = SequentialDrafter("draft", ModelDraftSession(draft, self._target.capabilities.vocab_size))
        last = self._passages[-1]
        cost = measure_drafter(drafter, last.text[: last.start + 1])
        plain_s = self._time_plain(last)  # at the same time as the draft: the machine may have become slower
        draft_s = cost.seconds(1) if cost is not None else float("inf")
        rows = {n: seconds * plain_s / self.profile.rows[1] for n, seconds in self.profile.rows.items()}
        length, speedup = choose_chain_length(rows, draft_s, agreed)
        return DraftEval(agreed, draft_s / plain_s, length, speedup)

    def _time_plain(self, passage: Passage) -> float:
        """Seconds of a plain step of the target, which has read what is before the compared positions."""
        times = []
        for _ in range(_PLAIN_STEPS):
            check_cancelled()
            started = perf_counter()
            self._target.forward(passage.text[passage.start], NO_DRAFT).argmax()
            self._target.commit(())
            times.append(perf_counter() - started)
            self._target.rewind(passage.start)
        return median(times)

    def _argmax(self, session: Session, passage: Passage) -> Ints:
        """[rows] the most probable tokens after the compared ones."""
        read_prompt(session, passage.text[: passage.start])
        best = read_choices(session, passage.text)
        session.rewind(passage.start)
        return best
