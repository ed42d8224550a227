"""Measure on load what forwards cost, on the sessions that will run them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.controller.cost_model import Profile
from edgespec.core.greedy import read_prompt
from edgespec.core.protocols import NO_DRAFT, CheckCancelled, Draft, Session

_ROWS = (1, 4, 2, 8, 1, 16, 3, 5, 6, 7, 12, 32, 9, 24)  # the most telling first
_START = 32  # tokens of context that the measurements begin at
_DRAFTED = 6
_REPEATS = 5


def measure(session: Session, draft: Session | None, seconds: float, check: CheckCancelled = lambda: None) -> Profile:
    """Forwards of up to 32 rows, until `seconds` have passed or each was seen five times; medians of what was seen.

    One row is measured at least twice, and a draft model's tokens a few times. Raises Cancelled, BackendError.
    """
    limits = session.capabilities
    tokens = _some(limits.vocab_size, limits.context_size)
    start = min(_START, limits.context_size // 2)
    _fill(session, tokens[:start])
    of_draft = drafting(draft, tokens, start, check) if draft is not None else (None, 0.0)
    _forward(session, tokens, 1)  # the first one warms caches up
    seen: dict[int, list[float]] = {}
    until = perf_counter() + seconds
    for _ in range(_REPEATS):
        for rows in _ROWS:
            check()
            if session.draft_limit < rows - 1 or session.position + rows > limits.context_size:
                _fill(session, tokens[:start])
            if session.draft_limit >= rows - 1:
                seen.setdefault(rows, []).append(_forward(session, tokens, rows))
            if perf_counter() >= until and len(seen.get(1, ())) >= 2:
                break
        if perf_counter() >= until:
            break
    session.rewind(0)
    return Profile({rows: median(times) for rows, times in sorted(seen.items())}, *of_draft)


def drafting(session: Session, tokens: Sequence[int], start: int, check: CheckCancelled) -> tuple[float, float]:
    """Seconds of a token that a draft session drafts after `start` of `tokens`, and of one that it reads.

    One that follows its target has from there what it holds of them. Raises Cancelled, BackendError.
    """
    read = []
    for _ in range(2):  # the first one warms caches up
        started = perf_counter()
        _fill(session, tokens[:start])
        read.append((perf_counter() - started) / start)
    times = []
    for _ in range(min(_DRAFTED, len(tokens) - start)):
        check()
        times.append(_forward(session, tokens, 1))
    session.rewind(0)
    return median(times), read[-1]


def _some(vocab_size: int, n: int) -> list[int]:
    """[n] tokens; which they are does not matter, as long as they differ (experts of a mixture are chosen by them)."""
    found: list[int] = ((np.arange(n) * 7919 + 11) % vocab_size).tolist()
    return found


def _fill(session: Session, tokens: Sequence[int]) -> None:
    session.rewind(0)
    read_prompt(session, tokens)


def _forward(session: Session, tokens: Sequence[int], rows: int) -> float:
    """Seconds of a round whose draft is not accepted; the context grows by one token."""
    at = session.position
    started = perf_counter()
    draft = Draft.chain(tokens[at + 1 : at + rows]) if rows > 1 else NO_DRAFT
    session.forward(tokens[at], draft).argmax()
    session.commit(())
    return perf_counter() - started
