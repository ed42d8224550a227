"""Measures the seconds of forwards on load, on the sessions that will run them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.controller.cost_model import Profile
from edgespec.core.greedy import read_prompt
from edgespec.core.protocols import NO_DRAFT, CheckCancelled, Draft, Session

_ROWS = (1, 4, 2, 8, 1, 16, 3, 5, 6, 7, 12, 32, 9, 24)  # the most informative first
_START = 32  # tokens of context at which the measurements begin
_DRAFTED = 6  # measured tokens of the draft model
_REPEATS = 5


def measure(session: Session, draft: Session | None, seconds: float, check: CheckCancelled = lambda: None) -> Profile:
    """Run forwards of up to 32 rows for `seconds`, five times each at most; the profile holds the medians.

    One row is measured twice at least, even after `seconds`. Raises Cancelled, BackendError.
    """
    limits = session.capabilities
    tokens = _make_tokens(limits.vocab_size, limits.context_size)
    start = min(_START, limits.context_size // 2)
    _fill(session, tokens[:start])
    draft_costs = measure_draft(draft, tokens, start, check) if draft is not None else (None, 0.0)
    _time_forward(session, tokens, 1)  # warm-up
    times: dict[int, list[float]] = {}
    until = perf_counter() + seconds
    for _ in range(_REPEATS):
        for rows in _ROWS:
            check()
            if session.draft_limit < rows - 1 or session.position + rows > limits.context_size:
                _fill(session, tokens[:start])
            if session.draft_limit >= rows - 1:
                times.setdefault(rows, []).append(_time_forward(session, tokens, rows))
            if perf_counter() >= until and len(times.get(1, ())) >= 2:
                break
        if perf_counter() >= until:
            break
    session.rewind(0)
    return Profile({rows: median(each) for rows, each in sorted(times.items())}, *draft_costs)


def measure_draft(session: Session, tokens: Sequence[int], start: int, check: CheckCancelled) -> tuple[float, float]:
    """(seconds of a token that a draft session drafts after `start` of `tokens`, seconds of a token that it reads).

    A session that shares the target's KV cache reads the tokens that the target holds. Raises Cancelled, BackendError.
    """
    read_s = []
    for _ in range(2):  # the first is the warm-up
        started = perf_counter()
        _fill(session, tokens[:start])
        read_s.append((perf_counter() - started) / start)
    draft_s = []
    for _ in range(min(_DRAFTED, len(tokens) - start)):
        check()
        draft_s.append(_time_forward(session, tokens, 1))
    session.rewind(0)
    return median(draft_s), read_s[-1]


def _make_tokens(vocab_size: int, n: int) -> list[int]:
    """[n] ids, spread over the vocabulary, since the tokens choose the experts of a mixture."""
    tokens: list[int] = ((np.arange(n) * 7919 + 11) % vocab_size).tolist()
    return tokens


def _fill(session: Session, tokens: Sequence[int]) -> None:
    session.rewind(0)
    read_prompt(session, tokens)


def _time_forward(session: Session, tokens: Sequence[int], rows: int) -> float:
    """Seconds of a round whose draft is rejected; the context grows by one token."""
    at = session.position
    started = perf_counter()
    draft = Draft.chain(tokens[at + 1 : at + rows]) if rows > 1 else NO_DRAFT
    session.forward(tokens[at], draft).argmax()
    session.commit(())
    return perf_counter() - started
