"""Metrics of a generation from its Steps. Tokens and times are counted nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from edgespec.core.protocols import PrefillProgress, Step


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counts and seconds of one generation; None for a figure that needs more tokens than were emitted.

    target_forwards    decode forwards of the target; the first token comes from prefill and needs none
    tau                mean tokens emitted per target forward, the first token excluded; 1.0 for plain decoding
    acceptance_rate    accepted_tokens / drafted_tokens
    alpha_by_depth     accepted / tested at draft depth 1, 2, ...; depths after a rejection are not tested
    tokens_per_second  1 / tpot_s
    times_plain        tokens_per_second over that of plain decoding with the same peers, at most tau; None where the
                       latter is unknown
    cached_tokens      prompt tokens that were cached before
    reasoning_tokens   emitted tokens of the reasoning phase
    ttft_s             request to first token
    tpot_s             first token to last, per token after the first
    step_p50_s, step_p99_s   gaps between steps
    prefill_s          request to the scores of the last prompt token
    draft_s, verify_s, sample_s, commit_s   sums over the steps, see Step
    """

    prompt_tokens: int
    emitted_tokens: int
    target_forwards: int
    drafted_tokens: int
    accepted_tokens: int
    tau: float | None
    acceptance_rate: float | None
    alpha_by_depth: tuple[float, ...]
    tokens_per_second: float | None
    ttft_s: float | None
    tpot_s: float | None
    step_p50_s: float | None
    step_p99_s: float | None
    prefill_s: float
    draft_s: float
    verify_s: float
    sample_s: float
    commit_s: float
    times_plain: float | None
    cached_tokens: int
    reasoning_tokens: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class PlainEstimate:
    """Seconds that plain decoding would have taken for the tokens of some steps."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._n_unknown = 0  # tokens of the steps before the first with an estimate

    def add(self, step: Step) -> None:
        """Add the next step, which is not the first one."""
        if step.plain_s is None:
            self._n_unknown += len(step.tokens)
        else:
            self._seconds += step.plain_s * (self._n_unknown + len(step.tokens))
            self._n_unknown = 0

    def compare(self, seconds: float, tau: float | None) -> float | None:
        """Speed over that of plain decoding, of steps that took `seconds`; None where that is unknown.

        A forward of more rows takes no less time, so a ratio above `tau` is an error of the estimate.
        """
        if self._n_unknown or not self._seconds or not seconds or tau is None:
            return None
        return min(self._seconds / seconds, tau)


class Meter:
    """Collects the Steps of one generation."""

    def __init__(self, prompt_tokens: int, started_s: float) -> None:
        """`started_s` is time.perf_counter() when the request arrived."""
        self._prompt_tokens = prompt_tokens
        self._started_s = started_s
        self._steps: list[Step] = []
        self._plain = PlainEstimate()
        self._reasoning = 0
        self._read_s: float | None = None
        self._cached = 0

    def add_progress(self, progress: PrefillProgress, at_s: float) -> None:
        """Tokens of the prompt were read at `at_s`, in seconds of time.perf_counter()."""
        self._cached, self._read_s = progress.reused, at_s

    def add(self, step: Step, reasoning: int = 0) -> None:
        """Add the next step; `reasoning` of its tokens belong to the reasoning phase."""
        self._steps.append(step)
        self._reasoning += reasoning
        if step.index:
            self._plain.add(step)

    def metrics(self) -> Metrics:
        steps = self._steps
        emitted = sum(len(s.tokens) for s in steps)
        forwards = sum(s.index > 0 for s in steps)
        drafted = sum(s.n_drafted for s in steps)
        accepted = sum(s.n_accepted for s in steps)
        gaps = np.diff([s.at_s for s in steps])
        tpot_s = float(gaps.sum()) / (emitted - 1) if emitted > 1 else None
        tau = (emitted - 1) / forwards if forwards else None
        ttft_s = steps[0].at_s - self._started_s if steps else None
        p50_s, p99_s = np.percentile(gaps, (50, 99)).tolist() if len(gaps) else (None, None)
        return Metrics(
            prompt_tokens=self._prompt_tokens,
            emitted_tokens=emitted,
            target_forwards=forwards,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            tau=tau,
            acceptance_rate=accepted / drafted if drafted else None,
            alpha_by_depth=_alpha_by_depth(steps),
            tokens_per_second=1 / tpot_s if tpot_s else None,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            step_p50_s=p50_s,
            step_p99_s=p99_s,
            prefill_s=self._prefill_s(),
            draft_s=sum(s.draft_s for s in steps),
            verify_s=sum(s.verify_s for s in steps),
            sample_s=sum(s.sample_s for s in steps),
            commit_s=sum(s.commit_s for s in steps),
            times_plain=self._plain.compare(float(gaps.sum()), tau),
            cached_tokens=self._cached,
            reasoning_tokens=self._reasoning,
        )

    def _prefill_s(self) -> float:
        if self._steps:
            return self._steps[0].at_s - self._steps[0].sample_s - self._started_s
        return self._read_s - self._started_s if self._read_s is not None else 0.0


def _alpha_by_depth(steps: Sequence[Step]) -> tuple[float, ...]:
    deepest = max((s.n_tested for s in steps), default=0)
    tested = [sum(s.n_tested > d for s in steps) for d in range(deepest)]
    accepted = [sum(s.n_accepted > d for s in steps) for d in range(deepest)]
    return tuple(a / t for a, t in zip(accepted, tested, strict=True))
