"""What decides whether drafts pay: for each question of practice this machine's number, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.autopilot.profile import Profile
from edgespec.models.draft_words import name_cures
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
    expected: SpeedEstimate, fit: Fit, drafters: Sequence[DrafterPlan], records: Mapping[str, AcceptanceRecord]
) -> Iterator[Practice]:
    """The checklist of a planned model.

    `expected` has the time of a token of the draft model, if there is one; those of heads and self-drafts are not known
    before a load. `records` of the drafters by their names, as far as there are some.
    """
    free = SpeedEstimate(expected.rows, None)
    lookups = [each for each in drafters if each.spec.needs in ("nothing", "memory")]
    models = [each for each in drafters if each not in lookups]
    main = next((each for each in models if each.spec.name == "model"), None)
    yield from _price_rows(expected)
    if lookups:
        yield _judge_work(free, _add_up(records, lookups))
    for each in models:
        record = records.get(each.spec.name, AcceptanceRecord())
        yield _judge_acceptance(expected if each is main else None, each, record)
    yield from _judge_streams(expected, "drafts" if main is not None else "drafts that cost nothing, as lookups,")
    judged = [main] if main is not None else lookups
    yield _judge_length(expected, _add_up(records, judged) if judged else None)
    yield _judge_memory(fit)


def _price_rows(expected: SpeedEstimate) -> Iterator[Practice]:
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


def _judge_acceptance(expected: SpeedEstimate | None, drafter: DrafterPlan, record: AcceptanceRecord) -> Practice:
    """What its acceptance means; `expected` is None if nobody knows yet what it costs."""
    question = f"acceptance of {shorten_names(drafter.label)}"
    measured = _describe(record) if record.tested else "not measured yet"
    if expected is None:
        return Practice(question, measured, "`edgespec bench` measures what it costs, and whether it pays")
    limit = "no acceptance pays" if expected.pays_from is None else f"it pays from {expected.pays_from:.0%}"
    depth, speedup = expected.speculative(record.share)
    if not record.tested:
        follows = "answers and `edgespec bench` measure it"
    elif depth:
        follows = f"drafts of {depth} give {speedup:.2f}x plain"
    elif record.is_low(1.0 if expected.pays_from is None else expected.pays_from):
        follows = name_cures(drafter.spec)
    else:
        follows = "more answers will tell"
    return Practice(question, f"{measured}, and {limit}", follows)


def _judge_streams(expected: SpeedEstimate, drafts: str) -> Iterator[Practice]:
    """Tells from which acceptance `drafts` pay where several answers share each forward."""
    limits = {n: _pays_from(expected, n) for n in _STREAMS if 2 * n <= max(expected.rows)}
    if len(limits) < 2:
        return
    paying = [f"{rate:.0%} for {n}" for n, rate in limits.items() if rate is not None]
    here = f"{drafts} pay from {', '.join(paying)}" if paying else f"{drafts} never pay"
    without = [str(n) for n, rate in limits.items() if rate is None]
    found = [rate for rate in limits.values() if rate is not None]
    if without:
        follows = f"the autopilot writes {' or '.join(without)} without drafts"
    elif all(one <= other for one, other in pairwise(found)) and found[0] < found[-1]:
        follows = "the autopilot drafts less the more are written"
    else:
        follows = "the autopilot decides by the answers that are written"
    yield Practice("answers at once", here, follows)


def _pays_from(expected: SpeedEstimate, streams: int) -> float | None:
    """The lowest acceptance that pays where `streams` answers share each forward of target and draft."""
    profile = Profile(expected.rows)
    longest = max(expected.rows) // streams
    rows = {n: profile.seconds(n * streams) for n in range(1, longest + 1)}
    draft_s = None if expected.draft_s is None else expected.draft_s * rows[1] / expected.rows[1]
    return SpeedEstimate(rows, draft_s).pays_from


def _judge_length(expected: SpeedEstimate, record: AcceptanceRecord | None) -> Practice:
    """How long an answer has to be for drafts to be noticed. `record` is None where no draft can be foretold."""
    one, widest = expected.rows[1], max(expected.rows)
    rate = 0.0 if record is None else record.share if record.tested else _MEANS_MUCH
    speedup = expected.speculative(rate)[1]
    reading_s = _PROMPT * expected.rows[widest] / widest
    here = f"{_ANSWER} tokens take {significant(_ANSWER * one)} s plain"
    if speedup > 1:
        here += f", {significant(_ANSWER * one / speedup)} s with {rate:.0%} accepted"
    here += f", and a prompt of {_PROMPT:,} at most {significant(reading_s)} s"
    follows = f"answers of less than about {reading_s / one:,.0f} tokens to it may wait longer for the prompt"
    return Practice("length of answers", here, f"{follows}, where drafts do not help")


def _judge_memory(fit: Fit) -> Practice:
    if not fit.fits:
        return Practice("memory left", "none", "a shorter --ctx, --kv-type q8_0 or smaller weights need less")
    left = fit.headroom if fit.own is None else min(fit.headroom, fit.own_headroom)
    each = fit.kv_for(fit.context) + fit.target.states // fit.caches
    if not each:
        return Practice("memory left", gib(left), "further answers at once take next to none")
    more = f"enough for {left // each:,} more answers at once of {fit.context:,} tokens each"
    return Practice("memory left", gib(left), more)
