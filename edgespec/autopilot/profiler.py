"""Measures the seconds of forwards on load, on the sessions that will run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.backends.attached_draft import AttachedDraft
from edgespec.backends.long_context import extend_cache
from edgespec.cancel import check_cancelled
from edgespec.core.decoding import read_prompt
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Session
from edgespec.errors import STOPS, BackendError, reason_of

LOAD_CONTEXTS = (2048,)  # measured on load; what longer ones take is extrapolated
CONTEXTS = (4096, 16384, 32768)  # measured in advance

_ROWS = (1, 4, 2, 8, 1, 16, 3, 5, 6, 7, 12, 32, 9, 64, 24, 48)  # the most informative first
_LONG_ROWS = (1, 16, 1, 4, 1, 2, 8)  # after longer contexts, whose curves differ from the short one's by few parameters
_MIN_ROWS = 5  # the first of _ROWS, which are measured on slow machines too
_MIN_LONG_ROWS = 3  # the first of _LONG_ROWS, which are measured in every longer context
_LONG_SLOWDOWN = 1.3  # assumed slowdown of forwards after a longer context, before one is measured
_START = 8  # tokens of context at which the measurements of forwards begin
_TEXT = 32  # tokens of the text that drafters read
_ROOM = 96  # tokens behind a longer context, which its measurements use
_DRAFTED = 6  # measured tokens of a drafter
_BLOCKS = (1, 2, 4, 8, 16)  # measured lengths of a block
_REPEATS = 5
_TRIES, _DISTURBED = 3, 0.9  # measurements at most; share of one row's time below which more rows are not credible
_DROP = 0.75  # share of the time of fewer rows below which more rows are measured again


def measure_rows(session: Session, seconds: float, clock: Callable[[], float] = perf_counter) -> dict[int, float]:
    """Median seconds of forwards by their rows, up to 64, run for `seconds` and five times each at most.

    The first rows, one row twice, are measured even after `seconds`; later ones only if they are expected to end
    before. `clock` times the forwards. If more rows take much less time than one row, other programs have disturbed the
    measurement, and it is repeated. After three in vain, the time of one row is the least for all. If more rows take
    much less time than fewer rows, all are measured once more, and the lower time of each counts: some kernels are that
    much faster from a number of rows on, and noise only adds time. Raises Cancelled and BackendError.
    """
    limits = session.capabilities
    tokens = _make_tokens(limits.vocab_size, limits.context_size)
    start = min(_START, limits.context_size // 2)

    def refill() -> None:
        _fill(session, tokens[:start])

    refill()
    for _ in range(_TRIES):
        times = _time_rows(session, tokens, _ROWS, _MIN_ROWS, seconds, clock, refill)
        if min(times.values()) > _DISTURBED * times[1]:
            break
    else:
        times = {rows: max(each, times[1]) for rows, each in times.items()}
    if seconds and _drops(times):
        again = _time_rows(session, tokens, _ROWS, _MIN_ROWS, seconds, clock, refill)
        lower = {rows: min(each, again.get(rows, each)) for rows, each in times.items()}
        times = {rows: max(lower[1], each) for rows, each in lower.items()}
    session.rewind(0)
    return times


def _drops(times: Mapping[int, float]) -> bool:
    """Whether some number of rows takes much less than the next smaller one that was measured."""
    seconds = [times[rows] for rows in sorted(times)]
    return any(more < _DROP * fewer for fewer, more in pairwise(seconds))


def choose_contexts(contexts: Sequence[int], context_size: int) -> list[int]:
    """The `contexts` that leave room in `context_size` tokens; the first that does not is as long as it can be."""
    longest = context_size - _ROOM
    chosen = [each for each in contexts if each <= longest]
    if len(chosen) < len(contexts) and longest > 1.5 * (chosen[-1] if chosen else _TEXT):
        chosen.append(longest)
    return chosen


def measure_contexts(
    target: Session, short: Profile, contexts: Sequence[int], seconds: float, attached: Mapping[str, AttachedDraft]
) -> Profile:
    """`short` with the costs after longer contexts, to which the cache is filled by copies, without forwards.

    Contexts are left out for which the time of `seconds` does not suffice, or to which the runtime cannot extend the
    cache. All are left out if forwards are so slow that `short` lacks the numbers of rows to compare with. `attached`
    are drafts that share the target's cache, by their names in `short`. Raises Cancelled, BackendError.
    """
    limits = target.capabilities
    least = _LONG_ROWS[:_MIN_LONG_ROWS]
    is_comparable = all(rows in short.rows for rows in least if target.draft_limit >= rows - 1)
    lengths = choose_contexts(contexts, limits.context_size) if is_comparable else []
    least_s = sum(short.seconds(rows) for rows in least) * _LONG_SLOWDOWN
    tokens = _make_tokens(limits.vocab_size, limits.context_size)
    until = perf_counter() + seconds
    longer: dict[int, Profile] = {}
    with ExitStack() as undo:
        undo.callback(target.rewind, 0)  # the copied cells are the cache of no text
        drafts: dict[str, tuple[Session, float]] = {}  # name -> (session, seconds of a token after few tokens)
        for i, length in enumerate(lengths):
            share_s = (until - perf_counter()) / (len(lengths) - i)
            if share_s < least_s:
                break
            if not longer:
                _fill(target, tokens[:_START])
                for name, draft in attached.items():
                    with suppress(BackendError):  # there may be no memory for a second session
                        session = draft.open_session(target)
                        undo.callback(session.close)
                        drafts[name] = session, _time_step(session, target, tokens)
            check_cancelled()
            if extend_cache(target, length) < length:
                break
            rows = _time_rows(target, tokens, _LONG_ROWS, _MIN_LONG_ROWS, share_s)
            more_s = {name: _time_step(each, target, tokens) - before_s for name, (each, before_s) in drafts.items()}
            longer[length] = Profile(rows, {name: _slow_down(short.drafts[name], s) for name, s in more_s.items()})
    return replace(short, longer=longer)


def _time_step(session: Session, target: Session, tokens: Sequence[int]) -> float:
    """Median seconds of a token of a draft, which grow with what its target holds."""
    times = [_time_forward(session, tokens, 1) for _ in range(1 + _REPEATS)]
    session.rewind(target.position)
    return median(times[1:])  # the first is the warm-up


def _slow_down(cost: DraftCost, more_s: float) -> DraftCost:
    """`cost` with `more_s` added to the seconds of every unit; a negative `more_s` adds nothing."""
    return replace(cost, units={n: s + max(0.0, more_s) for n, s in cost.units.items()})


def measure_drafters(drafters: Iterable[Drafter], target: Session) -> tuple[dict[str, DraftCost], dict[str, str]]:
    """(the cost of each drafter that takes time, the reasons of those that fail), by name.

    `target` is made to hold a text. A drafter that proposes nothing has no cost and is never asked. Raises Cancelled,
    and BackendError of the target.
    """
    limits = target.capabilities
    tokens = _make_tokens(limits.vocab_size, limits.context_size)[: min(_TEXT, limits.context_size // 2)]
    found: dict[str, DraftCost] = {}
    failures: dict[str, str] = {}
    for drafter in drafters:
        if not drafter.is_free:
            try:
                cost = measure_drafter(drafter, tokens, lambda: _fill(target, tokens[:-1]))
            except STOPS:
                raise
            except BaseException as error:  # noqa: BLE001 - it may be somebody else's code
                failures[drafter.name] = f"{reason_of(error)}."
                continue
            if cost is not None:
                found[drafter.name] = cost
    target.rewind(0)
    return found, failures


def measure_drafter(
    drafter: Drafter, tokens: Sequence[int], fill: Callable[[], None] = lambda: None
) -> DraftCost | None:
    """The cost of a drafter after `tokens`; None if it proposes nothing.

    `fill` makes its target read all of them but the last, the root: a head reads the hidden states of a token once.
    Raises what the drafter raises.
    """
    drafter.begin(tokens[:1], None)
    reading_s = []
    n_unread = 0
    for _ in range(2):  # the first is the warm-up
        check_cancelled()
        drafter.begin(tokens[-1:], None)  # another text, so that the tokens are read again
        fill()
        drafter.begin(tokens, None)
        n_unread = drafter.pending_tokens(tokens) - 1
        reading_s.append(sum(_time_units(drafter, tokens, Budget(1, 1))))
    lengths = [n for n in _BLOCKS if n <= drafter.block_size] if drafter.block_size > 1 else [1]
    units: dict[int, float] = {}
    for n in lengths:
        check_cancelled()
        if drafter.block_size > 1:
            others = [[*tokens[:-1], root] for root in tokens[:_REPEATS]]  # it may remember the draft after a text
            times = [s for text in others for s in _time_units(drafter, text, Budget(n, n))]
        else:
            times = _time_chain(drafter, tokens, _DRAFTED) or _time_units(drafter, tokens, Budget(_DRAFTED, _DRAFTED))
        if times:
            units[n] = median(times)
    if not units:
        return None
    read_s = max(0.0, reading_s[-1] - units[min(units)]) / n_unread if n_unread > 0 else 0.0
    return DraftCost(units, read_s)


def _time_rows(
    session: Session,
    tokens: Sequence[int],
    order: Sequence[int],
    n_least: int,
    seconds: float,
    clock: Callable[[], float] = perf_counter,
    refill: Callable[[], None] = lambda: None,
) -> dict[int, float]:
    """Median seconds of forwards by their rows, at the end of what the session holds.

    Rows come in the given order, at most five times each: the first `n_least` in any case, others if they are expected
    to end within `seconds`. `refill` makes room when the context is full.
    """
    times: dict[int, list[float]] = {}
    until = perf_counter() + seconds
    _time_forward(session, tokens, 1)  # warm-up
    for i, rows in enumerate([*order] * _REPEATS):
        check_cancelled()
        if i >= n_least and perf_counter() + _expect_s(times, rows) > until:
            continue
        if session.draft_limit < rows - 1:
            refill()
        if session.draft_limit >= rows - 1:
            times.setdefault(rows, []).append(_time_forward(session, tokens, rows, clock))
    return {rows: median(each) for rows, each in sorted(times.items())}


def _expect_s(times: Mapping[int, Sequence[float]], rows: int) -> float:
    """Seconds that a forward is expected to take by the median of those measured."""
    return Profile({n: median(each) for n, each in times.items()}).seconds(rows)


def _time_units(drafter: Drafter, tokens: Sequence[int], limit: Budget) -> list[float]:
    times = []
    started = perf_counter()
    for _ in drafter.expand(DraftTree(), tokens, limit):
        now = perf_counter()
        times.append(now - started)
        started = now
    return times


def _time_chain(drafter: Drafter, tokens: Sequence[int], n: int) -> list[float]:
    """Seconds of each token of a chain that the device computes without the host; none if there is no such chain."""
    started = perf_counter()
    chain = drafter.draft_async(tokens, Budget(n, n))
    if chain is None or not len(chain.tokens):  # reading the tokens waits for the device
        return []
    return [(perf_counter() - started) / len(chain)] * len(chain)


def _make_tokens(vocab_size: int, n: int) -> list[int]:
    """[n] ids, spread over the vocabulary, since the tokens choose the experts of a mixture."""
    tokens: list[int] = ((np.arange(n) * 7919 + 11) % vocab_size).tolist()
    return tokens


def _fill(session: Session, tokens: Sequence[int]) -> None:
    session.rewind(0)
    read_prompt(session, tokens)


def _time_forward(
    session: Session, tokens: Sequence[int], rows: int, clock: Callable[[], float] = perf_counter
) -> float:
    """Seconds of a round whose draft is rejected; the context grows by one token."""
    at = session.position
    started = clock()
    draft = Draft.chain(tokens[at + 1 : at + rows]) if rows > 1 else NO_DRAFT
    session.forward(tokens[at], draft).argmax()
    session.commit(())
    return clock() - started
