"""What decides whether drafts pay: for each question of practice this machine's number, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edgespec.autopilot.acceptance_record import AcceptanceRecord, name_cures
from edgespec.autopilot.profile import Profile, choose_chain_length, find_lowest
from edgespec.models.drafts import DrafterPlan
from edgespec.models.fit import Fit
from edgespec.models.short_names import shorten_names
from edgespec.models.speed import SpeedEstimate
from edgespec.units import count, gib, significant

_ROWS_PAY, _ROWS_COST = 1.5, 2.0  # plain steps of four rows
_STREAMS = (1, 2, 4, 8)
_ANSWER, _PROMPT = 100, 1000  # tokens, of an example
_MEANS_MUCH = 0.8  # acceptance of an example where none was measured


@dataclass(frozen=True, slots=True)
class Practice:
    """A question of practice, the number of this machine that answers it, and what follows."""

    question: str
    here: str
    follows: str

    def __str__(self) -> str:
        return f"{self.question}: {self.here}; {self.follows}"


def list_practices(
    expected: SpeedEstimate,
    fit: Fit,
    drafters: Sequence[DrafterPlan],
    records: Mapping[str, AcceptanceRecord],
    *,
    is_foretold: bool = True,
) -> Iterator[Practice]:
    """The checklist of a planned model.

    records      of its drafters by their names, as far as there are some
    is_foretold  whether `expected` has what a draft token takes; that of a self-draft or a head is not known
    """
    yield from price_rows(expected)
    free = SpeedEstimate(expected.rows, None)
    lookups = [each for each in drafters if each.spec.needs in ("nothing", "memory")]
    models = [each for each in drafters if each not in lookups]
    if lookups:
        yield _judge_work(free, _add_up(records, lookups))
    for each in models:
        yield _judge_acceptance(expected if is_foretold else None, each, records.get(each.spec.name))
    tested = _add_up(records, drafters)
    yield from _judge_streams(expected, "drafts" if is_foretold else "drafts that cost nothing")
    yield _judge_length(expected, (tested.share if tested.tested else _MEANS_MUCH) if is_foretold else 0.0)
    yield _judge_memory(fit)


def price_rows(expected: SpeedEstimate) -> Iterator[Practice]:
    """What four rows of a forward cost, in plain steps."""
    if 4 not in expected.rows:
        return
    cost = expected.rows[4] / expected.rows[1]
    if cost > _ROWS_COST:
        follows = "computing takes the time here, and drafts save only reading"
    elif cost < _ROWS_PAY:
        follows = "reading the weights takes the time here, and drafts save that"
    else:
        follows = "short drafts pay where they are mostly right"
    yield Practice("price of rows", f"four take {cost:.2f} plain steps", follows)


def _add_up(records: Mapping[str, AcceptanceRecord], drafters: Sequence[DrafterPlan]) -> AcceptanceRecord:
    """The record of several drafters together."""
    known = [records[each.spec.name] for each in drafters if each.spec.name in records]
    return AcceptanceRecord(
        max((each.answers for each in known), default=0),
        sum(each.accepted for each in known),
        sum(each.tested for each in known),
    )


def _judge_work(free: SpeedEstimate, record: AcceptanceRecord) -> Practice:
    """Whether the texts of earlier answers repeat, as lookups have found."""
    limit = "never pay here" if free.pays_from is None else f"pay from {free.pays_from:.0%}"
    if not record.tested:
        here = f"no answers yet, and lookups {limit}"
        return Practice("kind of work", here, "they find most in edits, code, summaries and agents' work")
    pays = free.pays_from is not None and record.share >= free.pays_from
    follows = "the texts repeat enough" if pays else "the texts repeat too little for them"
    return Practice("kind of work", f"lookups are right {_describe(record)}, and {limit}", follows)


def _describe(record: AcceptanceRecord) -> str:
    return f"{record.share:.0%} of the time over {count(record.answers, 'answer')}"


def _judge_acceptance(
    expected: SpeedEstimate | None, drafter: DrafterPlan, record: AcceptanceRecord | None
) -> Practice:
    """What its acceptance means; `expected` is None if nobody knows yet what it costs."""
    question = f"acceptance of {shorten_names(drafter.label)}"
    if expected is None:
        here = "not measured yet" if record is None or not record.tested else _describe(record)
        return Practice(question, here, "`edgespec bench` measures what it costs, and whether it pays")
    limit = "no acceptance pays" if expected.pays_from is None else f"it pays from {expected.pays_from:.0%}"
    if record is None or not record.tested:
        return Practice(question, f"not measured yet, and {limit}", "answers and `edgespec bench` measure it")
    depth, speedup = expected.speculative(record.share)
    if depth:
        follows = f"drafts of {depth} give {speedup:.2f}x plain"
    elif record.is_low(1.0 if expected.pays_from is None else expected.pays_from):
        follows = name_cures(trains=drafter.spec.needs == "model")
    else:
        follows = "more answers will tell"
    return Practice(question, f"{_describe(record)}, and {limit}", follows)


def _judge_streams(expected: SpeedEstimate, drafts: str) -> Iterator[Practice]:
    """From which acceptance `drafts` pay where several answers share each forward."""
    limits = {n: _pays_from(expected, n) for n in _STREAMS if 2 * n <= max(expected.rows)}
    if len(limits) < 2:
        return
    lost = next((n for n, rate in limits.items() if rate is None), None)
    paying = [f"{rate:.0%} for {n}" for n, rate in limits.items() if rate is not None]
    here = f"{drafts} pay from {', '.join(paying)}" if paying else f"{drafts} never pay"
    follows = "the autopilot drafts less the more are written"
    if lost is not None and paying:
        follows = f"{lost} or more are written without drafts"
    elif lost is not None:
        follows = "they are written without drafts"
    yield Practice("answers at once", here, follows)


def _pays_from(expected: SpeedEstimate, streams: int) -> float | None:
    """The lowest acceptance that pays where `streams` answers share each forward of target and draft."""
    profile = Profile(expected.rows)
    longest = max(expected.rows) // streams
    rows = {n: profile.seconds(n * streams) for n in range(1, longest + 1)}
    draft_s = (expected.draft_s or 0.0) * rows[1] / expected.rows[1]
    return find_lowest(lambda rate: round(choose_chain_length(rows, draft_s, rate)[1], 2) > 1)


def _judge_length(expected: SpeedEstimate, rate: float) -> Practice:
    """How long an answer has to be for drafts to be noticed; `rate` of them are accepted."""
    one = expected.rows[1]
    speedup = expected.speculative(rate)[1]
    widest = max(expected.rows)
    reading_s = _PROMPT * expected.rows[widest] / widest
    plain_s, reading = significant(_ANSWER * one), f"reading {_PROMPT:,} takes {significant(reading_s)} s at most"
    drafted = f" and {significant(_ANSWER * one / speedup)} s with {rate:.0%} accepted" if speedup > 1 else ""
    return Practice(
        "length of answers",
        f"{_ANSWER} tokens take {plain_s} s plain{drafted}, {reading}",
        f"below {reading_s / one:,.0f} tokens after such a prompt reading takes longer, which drafts do not shorten",
    )


def _judge_memory(fit: Fit) -> Practice:
    if not fit.fits:
        return Practice(
            "memory left", "none", "a shorter --ctx, --kv-type q8_0 or a smaller type of weights needs less"
        )
    more = fit.headroom // max(1, fit.kv_for(fit.context))
    here = gib(fit.headroom)
    return Practice("memory left", here, f"enough for {more:,} more answers at once of {fit.context:,} tokens each")
