"""Whether answers and tool calls are the same with drafts as without: greedy, request by request, arm by arm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from statistics import fmean
from typing import Any

from edgespec.answers.generation_spec import GenerationSpec
from edgespec.answers.response import TextDelta
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.bench.divergence import Divergence, first_divergence
from edgespec.bench.runner import Arm, Skipped, list_arms
from edgespec.cancel import check_cancelled
from edgespec.core.metrics import Metrics
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.engine.model_info import ModelInfo
from edgespec.errors import InvalidRequest, TemplateError
from edgespec.text.tool_calls import CallEnd

_FIXED = 4  # tokens that each drafter drafts in every round, whether it pays or not
_LEAST_TIMED = 8  # tokens of an answer whose speed counts


@dataclass(frozen=True, slots=True)
class Case:
    """A request, by its id and kind."""

    id: str
    kind: str
    spec: GenerationSpec


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a case by one arm.

    is_same  whether its tokens are those of plain decoding
    fork     where they differ; None if they do not, or if one answer is a part of the other
    calls    the tool calls that are whole
    leaked   the text of an answer in which the beginning of a call stayed text
    """

    case: str
    kind: str
    arm: str
    is_same: bool
    fork: Divergence | None
    calls: tuple[str, ...]
    leaked: str
    metrics: Metrics

    @property
    def is_fault(self) -> bool:
        """Whether the answer differs by more than the rounding of the target's own scores."""
        return not self.is_same and (self.fork is None or not self.fork.is_near_tie)

    def describe(self) -> dict[str, Any]:
        fork = self.fork.describe() if self.fork is not None else None
        return {**asdict(self), "fork": fork, "is_fault": self.is_fault}


def choose_arms(drafters: Sequence[str]) -> list[Arm]:
    """Plain decoding, the autopilot, and each drafter with four tokens in every round."""
    return [arm for arm in list_arms(drafters, [_FIXED]) if not arm.cold]


def verify(
    engine: Engine, model_info: ModelInfo, arms: Sequence[Arm], cases: Sequence[Case], max_tokens: int
) -> Iterator[Outcome | Skipped]:
    """Answer each case by every arm, plain decoding first, at temperature 0. Raises Cancelled, BackendError.

    The engine's own statistics and speculation are restored at the end.
    """
    stats, speculation = engine.draft_stats, engine.speculation
    engine.draft_stats = DraftStats(stats.costs.profile)
    session, opening = engine.target.open_session(), model_info.template.calls.opening
    try:
        for case in cases:
            plain: Finished | None = None
            try:
                spec = replace(case.spec, settings={**case.spec.settings, "temperature": 0.0})
                request = spec.build_request(model_info, token_limit=max_tokens)
                prompt = engine.prompts.encode(request.prompt, request.variables, request.start).tokens
                for arm in arms:
                    engine.speculation = Speculation(arm.drafters, arm.gamma, acceptance="sample")
                    finished, calls, text = _answer(engine, spec, model_info, request)
                    check_cancelled()
                    plain = plain or finished
                    yield Outcome(
                        case=case.id,
                        kind=case.kind,
                        arm=arm.name,
                        is_same=finished.tokens == plain.tokens,
                        fork=first_divergence(session, prompt, plain.tokens, finished.tokens),
                        calls=calls,
                        leaked=text if spec.tools_in_use and opening and opening in text else "",
                        metrics=finished.metrics,
                    )
            except (InvalidRequest, TemplateError) as error:
                yield Skipped(case.id, error.message)
    finally:
        engine.draft_stats, engine.speculation = stats, speculation
        session.close()


def _answer(
    engine: Engine, spec: GenerationSpec, model_info: ModelInfo, request: Request
) -> tuple[Finished, tuple[str, ...], str]:
    """The end of an answer, its whole calls, and its text without them."""
    response, calls, text = spec.make_response(model_info), list[str](), ""
    for event in engine.stream(request):
        for part in response.parts(event):
            if isinstance(part, CallEnd) and not part.is_cut:
                calls.append(f"{part.call.name}({part.call.arguments})")
            elif isinstance(part, TextDelta):
                text += part.text
        if isinstance(event, Finished):
            finished = event
    return finished, tuple(calls), text


@dataclass(frozen=True, slots=True)
class Row:
    """What an arm, or a kind of cases, came to.

    answers     how many
    near_ties   of them differ from plain decoding by the rounding of scores; `faults` differ by more
    calls       answers with whole calls, of the `asked` ones that had tools
    leaks       answers in which a call stayed text
    speedup     geometric mean of tokens/s over plain decoding; `worst` is the lowest
    """

    answers: int
    near_ties: int
    faults: int
    asked: int
    calls: int
    leaks: int
    drafted: int
    accepted: int
    tau: float | None
    speedup: float | None
    worst: float | None


def sum_up(outcomes: Sequence[Outcome], plain: Sequence[Outcome], tool_kinds: Sequence[str]) -> Row:
    """A row of the table; `plain` has the outcomes of plain decoding. Cases of `tool_kinds` have tools."""
    speeds = {(each.case, each.kind): each.metrics.tokens_per_second for each in plain}
    ratios = [
        speed / before
        for each in outcomes
        if each.metrics.emitted_tokens >= _LEAST_TIMED
        and (speed := each.metrics.tokens_per_second)
        and (before := speeds.get((each.case, each.kind)))
    ]
    forwards = sum(each.metrics.target_forwards for each in outcomes)
    emitted = sum(max(0, each.metrics.emitted_tokens - 1) for each in outcomes)
    return Row(
        answers=len(outcomes),
        near_ties=sum(not each.is_same and not each.is_fault for each in outcomes),
        faults=sum(each.is_fault for each in outcomes),
        asked=sum(each.kind in tool_kinds for each in outcomes),
        calls=sum(bool(each.calls) for each in outcomes),
        leaks=sum(bool(each.leaked) for each in outcomes),
        drafted=sum(each.metrics.drafted_tokens for each in outcomes),
        accepted=sum(each.metrics.accepted_tokens for each in outcomes),
        tau=emitted / forwards if forwards else None,
        speedup=exp(fmean(map(log, ratios))) if ratios else None,
        worst=min(ratios, default=None),
    )
